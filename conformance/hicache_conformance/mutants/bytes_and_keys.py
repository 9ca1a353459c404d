"""Bytes that do not come back as they went, and keys that are not told apart."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_conformance.mutants import mutant
from hicache_conformance.native import NativeStorage
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Capabilities, Page, Status, page_nbytes
from hicache_storage.buffers import scatter
from hicache_storage.open import layered
from hicache_storage.settings import SdkSettings
from hicache_storage.storage import HiCacheStorage


def _unproved(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """The layers without integrity: what the backend says is believed."""
    return layered(storage, sdk.model_copy(update={"integrity": False}), name)


@mutant("contract.every_byte_value")
class EndsAtNul(ReferenceStorage):
    """Values are C strings: what follows a NUL is lost and comes back as zeros."""

    def set(self, key: str, value: memoryview) -> None:
        raw = bytes(value)
        super().set(key, memoryview(raw.partition(b"\0")[0].ljust(len(raw), b"\x01")))


@mutant("contract.object_sizes")
class PadsToSectors(ReferenceStorage):
    """Objects are padded to 512 bytes for O_DIRECT and come back padded."""

    def set(self, key: str, value: memoryview) -> None:
        raw = bytes(value)
        super().set(key, memoryview(raw.ljust(-(-len(raw) // 512) * 512, b"\0")))


@mutant("contract.a_64_mib_object")
class StopsAt16MiB(ReferenceStorage):
    """A write that the kernel cut short is not continued; the rest is zeros."""

    def set(self, key: str, value: memoryview) -> None:
        super().set(key, memoryview(bytes(value[: 16 << 20]).ljust(len(value), b"\0")))


@mutant("contract.set_copies_what_outlives_the_call")
class KeepsTheCallersMemory(ReferenceStorage):
    """The store is a dict of views of the caller's pages."""

    def set(self, key: str, value: memoryview) -> None:
        self.store[key] = value  # type: ignore[assignment]


@mutant("contract.get_hands_out_no_way_in")
class ReusesItsReadBuffer(ReferenceStorage):
    """get returns a view of the one buffer that the next get overwrites."""

    _buffer = bytearray(64 << 20)

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if value is None:
            return None
        self._buffer[: len(value)] = value
        return memoryview(self._buffer)[: len(value)]  # type: ignore[return-value]


class _Renaming(ReferenceStorage):
    """Stores pages under other keys than it is given."""

    def stored(self, key: str) -> str:
        raise NotImplementedError

    def get(self, key: str) -> bytes | None:
        return super().get(self.stored(key))

    def exists(self, key: str) -> bool:
        return super().exists(self.stored(key))

    def set(self, key: str, value: memoryview) -> None:
        super().set(self.stored(key), value)

    def delete(self, keys: Sequence[str]) -> None:
        super().delete([self.stored(key) for key in keys])


@mutant("contract.awkward_names")
class FoldsCase(_Renaming):
    """Keys are compared without case, as on some file systems and HTTP headers."""

    def stored(self, key: str) -> str:
        return key.lower()


@mutant("contract.awkward_names")
class FlattensSeparators(_Renaming):
    """Dots become dashes, so that keys fit a naming rule (0.5.23 does that with slashes)."""

    def stored(self, key: str) -> str:
        return key.replace(".", "-")


@mutant("contract.awkward_names")
class CutsLongKeys(_Renaming):
    """Keys longer than 199 characters are cut."""

    def stored(self, key: str) -> str:
        namespace, _, name = key.partition("/")
        return f"{namespace}/{name[:199]}"


@mutant("contract.near_collisions")
class KeyOf64Bits(_Renaming):
    """The page hash is cut to 64 bits (HiCacheKVCM, survey A1)."""

    def stored(self, key: str) -> str:
        namespace, _, name = key.partition("/")
        return f"{namespace}/{name[:16]}"


@mutant("zero-copy.scattered_pages")
class SwapsKAndV(NativeStorage):
    """Pages of two equal buffers come back with K and V exchanged."""

    def read_page(self, key: str, page: Page) -> Status:
        even = len(page) == 2 and page[0].nbytes == page[1].nbytes
        return super().read_page(key, page[::-1] if even else page)


@mutant("zero-copy.another_scatter_list")
class StoresBuffersApart(NativeStorage):
    """The object is a list of buffers; only a page cut in the same way can be read."""

    def write_page(self, key: str, page: Page) -> Status:
        self.store[f"{key}#"] = bytes(len(page))
        return super().write_page(key, page)

    def read_page(self, key: str, page: Page) -> Status:
        if len(self.store.get(f"{key}#", b"")) != len(page) and key in self.store:
            return Status.CORRUPT
        return super().read_page(key, page)


@mutant("zero-copy.large_batch_of_scattered_pages")
class CutsTheDescriptorList(NativeStorage):
    """A batch moves its first 1,024 buffers, the limit of one system call, and is OK."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        whole = 1024 // max(map(len, pages), default=1)
        statuses = super().batch_get_into(keys[:whole], pages[:whole])
        return statuses + [Status.OK if key in self.store else Status.MISSING for key in keys[whole:]]


@mutant("content.truncated", "content.extended", "content.other_dtype", stack=_unproved)
class ShortReadAccepted(NativeStorage):
    """A short read is OK and leaves the rest of the page as it was; a long one is cut."""

    def read_page(self, key: str, page: Page) -> Status:
        value, nbytes = self.store.get(key), page_nbytes(page)
        if value is None:
            return Status.MISSING
        scatter(value[:nbytes].ljust(nbytes, b"\0"), page)
        return Status.OK


@mutant("content.bit_flip", "content.truncated", "content.swapped")
class SetSkipsPresentPages(ReferenceStorage):
    """set does nothing when the key is there, and a corrupt page cannot be deleted: poison for good."""

    capabilities = Capabilities()

    def set(self, key: str, value: memoryview) -> None:
        self.store.setdefault(key, bytes(value))

    @staticmethod
    def conformance_corruptor(storage: ReferenceStorage) -> _DictCorruptor:
        """Contract calls cannot damage what set does not replace."""
        return _DictCorruptor(storage)


class _DictCorruptor:
    """Straight into the dict."""

    def __init__(self, storage: ReferenceStorage) -> None:
        self._store = storage.store

    def read(self, key: str) -> bytes | None:
        return self._store.get(key)

    def write(self, key: str, raw: bytes) -> None:
        self._store[key] = raw
