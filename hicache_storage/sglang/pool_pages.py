"""One host pool's pages, read from and written to the store.

Where the pool's pages can be addressed, they move straight from and into its memory. Pools that
only hand out copies, and the tensors of the generic interface, go through bounce memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hicache_storage.bounce import BounceMemory, cut
from hicache_storage.buffers import Buffer
from hicache_storage.errors import BufferMismatchError, SettingsError
from hicache_storage.sglang.host_pools import map_pages, pool_memory
from hicache_storage.storage import HiCacheStorage, Status


class PoolPages:
    """The pages of ``pool`` under the names ``<page hash><suffix>``.

    Registers the pool's memory with ``storage`` for its own lifetime. Raises StorageError when
    the backend refuses it, SettingsError when the pool's pages cannot be reached at all.
    """

    def __init__(self, storage: HiCacheStorage, pool: Any, suffix: str) -> None:
        self.storage = storage
        self.map = map_pages(pool)
        self.bounce = BounceMemory(storage)
        self.nbytes = self.nbytes_of(pool)
        self._pool = pool
        self._suffix = suffix
        self._page_size = int(getattr(pool, "page_size", 1) or 1)
        self._registered = []
        for memory in pool_memory(pool) if self.map else []:
            storage.register_buffer(memory)
            self._registered.append(memory)

    def __str__(self) -> str:
        if self.map is None:
            kind = type(self._pool).__name__
            return f"{self.nbytes} bytes a page, copied: {kind} gives no addresses in this layout"
        return f"{self.nbytes} bytes a page in {len(self.map.pieces)} buffers, zero copy"

    @staticmethod
    def nbytes_of(pool: Any) -> int:
        """Size of one page in bytes."""
        try:
            return int(pool.get_dummy_flat_data_page().nbytes)
        except (NotImplementedError, AttributeError) as error:
            pages = map_pages(pool)
            if pages is None:
                raise SettingsError(
                    f"the pages of {type(pool).__name__} with layout {getattr(pool, 'layout', '?')!r} "
                    f"can be neither addressed nor copied ({error}); another --hicache-mem-layout may do"
                ) from error
            return pages.nbytes

    @property
    def layout(self) -> str:
        """The layout in force, by SGLang's name."""
        return str(getattr(self._pool, "layout", "?"))

    def names(self, hashes: Sequence[str]) -> list[str]:
        """The page names of these hashes in this pool."""
        return [f"{page_hash}{self._suffix}" for page_hash in hashes]

    def get(self, hashes: Sequence[str], host_indices: torch.Tensor) -> list[Status]:
        """Read each page to where its host indices point; one status a hash."""
        indices = self._first_indices(hashes, host_indices)
        if self.map is not None:
            return self.storage.batch_get_into(self.names(hashes), [self.map.page(i) for i in indices])
        return self._bounced(
            self.names(hashes), lambda n, data: self._put_page(indices[n], data), write=False
        )

    def set(self, hashes: Sequence[str], host_indices: torch.Tensor) -> list[Status]:
        """Store each page from where its host indices point; one status a hash."""
        indices = self._first_indices(hashes, host_indices)
        if self.map is not None:
            return self.storage.batch_set_from(self.names(hashes), [self.map.page(i) for i in indices])
        return self._bounced(
            self.names(hashes), lambda n, data: self._take_page(indices[n], data), write=True
        )

    def close(self) -> None:
        """Unregister the memory; no call may be in progress."""
        registered, self._registered = self._registered, []
        for memory in registered:
            self.storage.unregister_buffer(memory)
        self.bounce.close()

    def _first_indices(self, hashes: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        if host_indices is None or host_indices.numel() != len(hashes) * self._page_size:
            got = None if host_indices is None else host_indices.numel()
            raise BufferMismatchError(f"{len(hashes)} pages of {self._page_size} indices, but {got} indices")
        return [int(index) for index in host_indices[:: self._page_size].tolist()]

    def _bounced(
        self, names: Sequence[str], copy: Callable[[int, memoryview], None], *, write: bool
    ) -> list[Status]:
        return bounced(self.storage, self.bounce, names, [self.nbytes] * len(names), copy, write=write)

    def _take_page(self, index: int, target: memoryview) -> None:
        page = flat_bytes(self._pool.get_data_page(index, flat=True))
        target[:] = page.view

    def _put_page(self, index: int, source: memoryview) -> None:
        page = self._pool.get_dummy_flat_data_page()
        flat_bytes(page).view[:] = source
        self._pool.set_from_flat_data_page(index, page)


def tensor_pages(
    pages: PoolPages, hashes: Sequence[str], tensors: Sequence[torch.Tensor], *, write: bool
) -> list[Status]:
    """Store the tensors, or read into them, each one the flat page of its hash."""

    def copy(number: int, data: memoryview) -> None:
        if not write and not tensors[number].is_contiguous():
            raise BufferMismatchError("a tensor to read into must be contiguous")
        page = flat_bytes(tensors[number])
        if write:
            data[:] = page.view
        else:
            page.view[:] = data

    sizes = [tensor.nbytes for tensor in tensors]
    return bounced(pages.storage, pages.bounce, pages.names(hashes), sizes, copy, write=write)


def bounced(
    storage: HiCacheStorage,
    bounce: BounceMemory,
    names: Sequence[str],
    sizes: Sequence[int],
    copy: Callable[[int, memoryview], None],
    *,
    write: bool,
) -> list[Status]:
    """Move pages through bounce memory; ``copy(i, data)`` fills or empties the memory of page i."""
    statuses: list[Status] = []
    for part in cut(sizes):
        buffers = bounce.pages(sizes[part])
        numbered = list(zip(range(part.start, part.stop), buffers, strict=True))
        if write:
            for i, buffer in numbered:
                copy(i, buffer.view)
            statuses += storage.batch_set_from(names[part], [(buffer,) for buffer in buffers])
        else:
            got = storage.batch_get_into(names[part], [(buffer,) for buffer in buffers])
            for (i, buffer), status in zip(numbered, got, strict=True):
                if status:
                    copy(i, buffer.view)
            statuses += got
    return statuses


def flat_bytes(tensor: torch.Tensor) -> Buffer:
    """The tensor's bytes, whatever its dtype; a copy where it is not contiguous. It owns them."""
    flat = tensor.contiguous()
    return Buffer(flat.data_ptr(), flat.nbytes, flat)
