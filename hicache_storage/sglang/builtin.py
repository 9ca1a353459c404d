"""The reverse: SGLang's own backends under our contract, as ``sglang:<name>``.

So the engine, the conformance suite and the benchmarks drive ``sglang:file`` or ``sglang:mooncake``
exactly as they drive ours. Any name that SGLang's ``StorageBackendFactory`` knows will do; its
settings go through as SGLang's ``extra_config``.

Backends of the generic interface get tensors. Backends of the v1 interface ask a host pool where
pages lie; a stand-in pool answers with the pages of the call in progress.
"""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from hicache_storage.buffers import Buffer, Page, copy, page_nbytes
from hicache_storage.errors import BufferMismatchError, SettingsError, UnavailableError, UnsupportedError
from hicache_storage.namespace import Namespace
from hicache_storage.storage import Capabilities, HiCacheStorage, ReadableBuffer, Status, check_batch

INSTALL = {
    "mooncake": "pip install mooncake-transfer-engine (mooncake-transfer-engine-cuda13 on CUDA 13)",
    "nixl": "pip install nixl",
    "hf3fs": "install the 3FS client, hf3fs_py_usrbio, from the 3FS project",
    "aibrix": "pip install aibrix-kvcache",
    "eic": "install the EIC client of Volcano Engine",
    "simm": "pip install simm",
    "seaweedfs": "pip install boto3",
    "mori": "install mori, from the ROCm project",
    "npu_memcache": "install memcache_hybrid, for Ascend",
    "tensorcast": "pip install tensorcast",
}

KEPT_SIZES = 100_000
"""Sizes of objects remembered for ``get``, over all clients of a backend in this process."""

GENERIC = ("file",)
"""Backends that implement only the tensor interface; SGLang itself names the others in a list."""


class BuiltinSettings(BaseModel):
    """Whatever the backend calls its settings: SGLang checks none of them, so neither can we."""

    model_config = ConfigDict(extra="allow", frozen=True)

    page_nbytes: int = Field(0, ge=0, description="Bytes a page, for backends that divide a file beforehand")


class StandInPool:
    """What a v1 backend sees of L2: pages of one index each, wherever they lie in memory.

    ``get_page_buffer_meta`` is answered with the pages that the calling thread is moving.
    """

    layout = "page_first"
    page_size = 1
    dtype: Any
    device = "cpu"
    pin_memory = False

    def __init__(self, page_nbytes: int) -> None:
        import torch

        self._page_nbytes = page_nbytes
        self.dtype = torch.uint8
        self.kv_buffer: Any = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
        self._moving = threading.local()

    @contextmanager
    def moving(self, pages: Sequence[Page]) -> Any:
        """Index i stands for ``pages[i]`` inside, in this thread."""
        self._moving.pages = pages
        try:
            yield
        finally:
            del self._moving.pages

    def get_size_per_token(self) -> int:
        """Bytes of one index, which is a page here."""
        return self._page_nbytes

    def get_ksize_per_token(self) -> int:
        """Bytes of its K half."""
        return self._page_nbytes // 2

    def is_stride_page_aligned(self, nbytes: int = 4096) -> bool:
        """Whether O_DIRECT can take L2; that pages lie as it does is up to who cut them."""
        return int(self.kv_buffer.data_ptr()) % nbytes == 0

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Addresses and sizes in bytes of the pages with these indices, one after the other."""
        buffers = [buffer for index in indices.tolist() for buffer in self._moving.pages[index]]
        return [buffer.address for buffer in buffers], [buffer.nbytes for buffer in buffers]


@functools.cache
def builtin_backend(name: str) -> type[HiCacheStorage]:
    """A class of our contract over SGLang's backend ``name``. Raises SettingsError without sglang."""
    try:
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
    except ImportError as error:
        raise SettingsError(f"sglang:{name} needs SGLang itself: pip install sglang ({error})") from error
    known = sorted(StorageBackendFactory._registry)  # noqa: SLF001 (there is no public list)
    if name not in known:
        raise SettingsError(f"SGLang has no backend {name!r}; it has {', '.join(known)}")
    kind = GenericBuiltin if name in GENERIC else ZeroCopyBuiltin
    members = {"name": name, "_sizes": {}, "__doc__": f"SGLang's own backend {name!r}."}
    return type(f"SGLang_{name}", (kind,), members)


class Builtin(HiCacheStorage):
    """Opens the backend through SGLang's factory, as SGLang does. Keys are flattened to one name."""

    Settings = BuiltinSettings
    capabilities = Capabilities(persistent=True, shared=True, clear=True)
    name: ClassVar[str]
    _sizes: ClassVar[dict[str, int]]

    def __init__(self, settings: BuiltinSettings, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

        self._pool = StandInPool(settings.page_nbytes)
        config = storage_config(namespace, dict(settings.model_extra or {}))
        try:
            self.backend = StorageBackendFactory.create_backend(self.name, config, self._pool)
            self.backend.register_mem_pool_host(self._pool)
        except ImportError as error:
            hint = INSTALL.get(self.name, f"install what provides {error.name!r}")
            raise SettingsError(f"sglang:{self.name} lacks its client library ({error}): {hint}") from error
        except Exception as error:
            raise SettingsError(f"sglang:{self.name} does not open with these settings: {error}") from error

    def get(self, key: str) -> ReadableBuffer | None:
        """SGLang's backends read into memory of a known size: the one this process last moved.

        Raises UnsupportedError for a key that is there when neither that nor ``page_nbytes`` is known.
        """
        nbytes = self._sizes.get(key, self.settings.page_nbytes)
        if not nbytes:
            if not self.exists(key):
                return None
            raise UnsupportedError(f"sglang:{self.name} cannot read {key}: its size is not known")
        value = bytearray(nbytes)
        status = self.batch_get_into([key], [[Buffer.of(value)]])[0]
        return value if status else None

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        page = [Buffer.of(bytearray(value))]
        if not self.batch_set_from([key], [page])[0]:
            raise UnavailableError(f"sglang:{self.name} did not store {key}")

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """SGLang's backends count a leading run, so the answer for what follows a gap is asked anew."""
        names = _flat(keys)
        found: list[bool] = []
        while len(found) < len(names):
            run = int(self.backend.batch_exists(names[len(found) :]) or 0)
            found += [True] * run
            if len(found) < len(names):
                found.append(False)
        return found[: len(names)]

    def _remember(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        self._sizes.update((key, page_nbytes(page)) for key, page in zip(keys, pages, strict=True))
        while len(self._sizes) > KEPT_SIZES:
            self._sizes.pop(next(iter(self._sizes)))

    def clear(self) -> None:
        self.backend.clear()

    def close(self) -> None:
        close = getattr(self.backend, "close", None)  # not in SGLang's interface, yet called by it
        if close is not None:
            close()


class GenericBuiltin(Builtin):
    """Pages as flat tensors of bytes; a page in several buffers is copied once, as SGLang does."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        import torch

        from hicache_storage.sglang.pool_pages import flat_bytes

        targets = [torch.empty(page_nbytes(page), dtype=torch.uint8) for page in pages]
        got = self.backend.batch_get(_flat(keys), targets)
        for page, target, tensor in zip(pages, targets, got, strict=True):
            if tensor is not None:
                copy([flat_bytes(target)], page)
        return [Status.MISSING if tensor is None else Status.OK for tensor in got]

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        self._remember(keys, pages)
        import torch

        from hicache_storage.sglang.pool_pages import flat_bytes

        tensors = [torch.empty(page_nbytes(page), dtype=torch.uint8) for page in pages]
        for page, tensor in zip(pages, tensors, strict=True):
            copy(page, [flat_bytes(tensor)])
        stored = [self.backend.set(k, tensor) for k, tensor in zip(_flat(keys), tensors, strict=True)]
        return [Status.OK if done is True else Status.FAILED for done in stored]


class ZeroCopyBuiltin(Builtin):
    """Pages by address, through the stand-in pool."""

    capabilities = Capabilities(zero_copy=True, persistent=True, shared=True, clear=True)

    def register_buffer(self, buffer: Buffer) -> None:
        """Raises BufferMismatchError when the backend refuses, such as memory that it knows already.

        SGLang's interface has no way to take a registration back.
        """
        import torch

        memory = torch.frombuffer(buffer.view, dtype=torch.uint8)
        register = getattr(self.backend, "register_buffer", None)
        if register is None:  # then it takes memory from the pool alone
            self._pool.kv_buffer = memory
            self.backend.register_mem_pool_host(self._pool)
        else:
            try:
                register(memory)
            except RuntimeError as error:
                raise BufferMismatchError(
                    f"sglang:{self.name} refuses {buffer.nbytes} bytes at {buffer.address:#x}: {error}"
                ) from error

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        pieces = [self._pieces(page) for page in pages]
        statuses = self._move(self.backend.batch_get_v1, keys, pieces, Status.MISSING)
        for page, own, status in zip(pages, pieces, statuses, strict=True):
            if status and own is not page:
                copy(own, page)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        self._remember(keys, pages)
        pieces = [self._pieces(page) for page in pages]
        for page, own in zip(pages, pieces, strict=True):
            if own is not page:
                copy(page, own)
        return self._move(self.backend.batch_set_v1, keys, pieces, Status.FAILED)

    def _pieces(self, page: Page) -> Page:
        """The page in as many equal pieces as SGLang's pools have a page in: K and V, or MLA's one.

        That is the page itself, where it is cut so; any other goes through memory of ours, which
        over RDMA no backend would take.
        """
        count, nbytes = 1 if self.namespace.attention == "mla" else 2, page_nbytes(page)
        if [buffer.nbytes for buffer in page] == [nbytes // count] * count:
            return page
        own = Buffer.of(bytearray(nbytes))
        half = nbytes // count
        return [own.slice(i * half, half if i + 1 < count else nbytes - i * half) for i in range(count)]

    def _move(self, call: Any, keys: Sequence[str], pages: Sequence[Page], failed: Status) -> list[Status]:
        """Raises UnavailableError for whatever the backend raises."""
        if not keys:
            return []
        import torch

        try:
            with self._pool.moving(pages):
                done = call(_flat(keys), torch.arange(len(pages)))
        except Exception as error:
            raise UnavailableError(f"sglang:{self.name}: {error}") from error
        if not isinstance(done, list) or len(done) != len(keys):
            return [Status.FAILED] * len(keys)
        return [Status.OK if ok is True else failed for ok in done]


def storage_config(namespace: Namespace, extra_config: dict[str, Any]) -> Any:
    """SGLang's storage config for a single rank of this namespace, in whichever version is there."""
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

    ranks = {axis: (rank, size) for axis, rank, size in namespace.ranks}
    tp_rank, tp_size = ranks.get("tp", (0, 1))
    pp_rank, pp_size = ranks.get("pp", (0, 1))
    values = {
        "tp_rank": tp_rank,
        "tp_size": tp_size,
        "pp_rank": pp_rank,
        "pp_size": pp_size,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": namespace.attention == "mla",
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": namespace.model,
        "extra_config": extra_config,
    }
    known = HiCacheStorageConfig.__dataclass_fields__
    return HiCacheStorageConfig(**{key: value for key, value in values.items() if key in known})


def _flat(keys: Sequence[str]) -> list[str]:
    """Object keys without their slash: several of these backends take a key for a file name."""
    return [key.replace("/", "-") for key in keys]
