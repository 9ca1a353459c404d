"""Page memory misused: overrun, modified, held on to, or not understood."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_conformance.mutants import mutant
from hicache_conformance.native import NativeStorage
from hicache_conformance.pages import GUARD_NBYTES
from hicache_storage import Buffer, CapacityError, Page, Status, page_nbytes
from hicache_storage.buffers import scatter


@mutant("zero-copy.unaligned_memory")
class RefusesUnaligned(NativeStorage):
    """Memory that O_DIRECT would refuse is refused."""

    def write_page(self, key: str, page: Page) -> Status:
        if any(buffer.address % 8 for buffer in page):
            return Status.FAILED
        return super().write_page(key, page)


@mutant("zero-copy.several_regions")
class OneRegionOnly(NativeStorage):
    """Each registration takes the place of the last one."""

    def register_buffer(self, buffer: Buffer) -> None:
        self.regions = [buffer]

    def unregister_buffer(self, buffer: Buffer) -> None:
        self.regions = [region for region in self.regions if region != buffer]


@mutant("zero-copy.nothing_outside_the_pages")
class BufferOverrun(NativeStorage):
    """An object longer than the page is written past its end (by less than the guards are long)."""

    def read_page(self, key: str, page: Page) -> Status:
        value, nbytes = self.store.get(key, b""), page_nbytes(page)
        if len(value) > nbytes:
            over = value[nbytes : nbytes + GUARD_NBYTES // 2]
            Buffer(page[-1].end, len(over)).view[:] = over
            return Status.CORRUPT
        return super().read_page(key, page)


@mutant("zero-copy.source_is_never_modified")
class PadsInPlace(NativeStorage):
    """The source is padded in the caller's memory before it is stored."""

    def write_page(self, key: str, page: Page) -> Status:
        status = super().write_page(key, page)
        page[-1].view[-1] = 0
        page[0].view[0] ^= 0xFF
        return status


@mutant("zero-copy.unregistered_memory")
class SkipsUnregistered(NativeStorage):
    """Pages outside registered memory are passed over, and reported OK."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        known = [all(any(r.contains(b) for r in self.regions) for b in page) for page in pages]
        return [
            self.read_page(key, page) if there else (Status.OK if key in self.store else Status.MISSING)
            for key, page, there in zip(keys, pages, known, strict=True)
        ]


@mutant("zero-copy.registering_again")
class RegistersOnce(NativeStorage):
    """Memory that was registered once cannot be registered again (its handle was never freed)."""

    def register_buffer(self, buffer: Buffer) -> None:
        seen: set[int] = self.__dict__.setdefault("seen", set())
        if buffer.address in seen:
            raise CapacityError("the region is registered already")
        seen.add(buffer.address)
        super().register_buffer(buffer)


@mutant("zero-copy.unregistered_memory_is_let_go")
class RegistrationLeak(NativeStorage):
    """unregister_buffer does nothing (sglang#25173)."""

    def unregister_buffer(self, buffer: Buffer) -> None:
        pass


@mutant("zero-copy.reads_without_a_copy")
class CopiesOnTheWay(NativeStorage):
    """Reads build the whole batch in memory first (sglang#21880)."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        values = [bytearray(self.store.get(key, b"")) for key in keys]
        statuses = []
        for key, page, value in zip(keys, pages, values, strict=True):
            fits = len(value) == page_nbytes(page)
            if fits:
                scatter(value, page)
            missing = key not in self.store
            statuses.append(Status.OK if fits else Status.MISSING if missing else Status.CORRUPT)
        return statuses


@mutant("zero-copy.overlapping_pages_of_one_source")
class LocksItsSource(NativeStorage):
    """A page that is already part of the batch is busy."""

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_set_from(keys, pages)
        addresses = [page[0].address for page in pages]
        return [
            Status.FAILED if address in addresses[:i] else status
            for i, (address, status) in enumerate(zip(addresses, statuses, strict=True))
        ]


@mutant("zero-copy.buffers_without_an_owner")
class NeedsAnOwner(NativeStorage):
    """Memory is reached through the Python object that owns it, which an engine's buffers do not have."""

    def write_page(self, key: str, page: Page) -> Status:
        if any(buffer.owner is None for buffer in page):
            return Status.FAILED
        return super().write_page(key, page)
