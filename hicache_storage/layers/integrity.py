"""Proves content: a header in front of every object, checked on every read.

The header travels as one more buffer of the page's scatter list, so a zero-copy backend stays
zero-copy. An object whose header is not exactly the one that key and payload demand (see
``hicache_storage.header``) is CORRUPT: the caller sees a miss, the object is deleted, and the next
``set`` heals it. sglang issue 39269 shows the alternative: a truncated page that is served as an
error for ever, because ``set`` finds that the key is there.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from hicache_storage.buffers import Buffer, Page, page_nbytes, views
from hicache_storage.errors import CorruptError, StorageError
from hicache_storage.header import PLAIN_NBYTES, header_nbytes, pack, unpack
from hicache_storage.layers.layer import Layer
from hicache_storage.page_hook import per_page
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status, check_batch

logger = logging.getLogger(__name__)

PARALLEL_NBYTES = 8 << 20
"""Batches smaller than this are hashed by the calling thread: waking others costs more."""


class HeaderArena:
    """Memory for the headers of batches in flight, registered with the backend like L2 is.

    It grows by whole blocks while calls need more and is freed at ``close``.
    """

    BLOCK_NBYTES = 1 << 20

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage
        self._lock = threading.Lock()
        self._blocks: list[Buffer] = []
        self._free: dict[int, list[Buffer]] = {}

    @contextmanager
    def headers(self, sizes: Sequence[int]) -> Iterator[list[Buffer]]:
        """Buffers of these sizes for the time of one call; each lies at a multiple of its size."""
        taken = [self._take(size) for size in sizes]
        try:
            yield taken
        finally:
            with self._lock:
                for buffer in taken:
                    self._free[buffer.nbytes].append(buffer)

    def close(self) -> None:
        """Unregister and free all of it; no call may be in progress."""
        with self._lock:
            blocks, self._blocks, self._free = self._blocks, [], {}
        for block in blocks:
            self._storage.unregister_buffer(block)

    def _take(self, size: int) -> Buffer:
        with self._lock:
            free = self._free.setdefault(size, [])
            if not free:
                block = Buffer.allocate(self.BLOCK_NBYTES)
                self._storage.register_buffer(block)
                self._blocks.append(block)
                free.extend(block.slice(at, size) for at in range(0, block.nbytes - size + 1, size))
            return free.pop()


class IntegrityLayer(Layer):
    """Adds and verifies the header."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self._arena = HeaderArena(inner)
        self._hashers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "hicache-checksum")

    def get(self, key: str) -> ReadableBuffer | None:
        raw = self.inner.get(key)
        if raw is None:
            return None
        stored = memoryview(raw).cast("B")
        header = unpack(bytes(stored[:PLAIN_NBYTES]))
        if header is not None and PLAIN_NBYTES <= header.nbytes <= stored.nbytes:
            payload = stored[header.nbytes :]
            if stored[: header.nbytes] == pack(key, [payload], header.nbytes):
                return payload
        self._discard([key])
        raise CorruptError(f"object {key} is not what was stored under this key; it was removed")

    def set(self, key: str, value: memoryview) -> None:
        header = pack(key, [value], self._header_nbytes(value.nbytes))
        self.inner.set(key, memoryview(header + value))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        sizes = [page_nbytes(page) for page in pages]
        proved: list[bool | None] = [None] * len(keys)
        with self._arena.headers([self._header_nbytes(size) for size in sizes]) as headers:

            def verify(i: int) -> None:
                proved[i] = headers[i].view == pack(keys[i], views(pages[i]), headers[i].nbytes)

            objects = _with_headers(headers, pages)
            if self.inner.capabilities.page_hook:
                with per_page(verify):
                    statuses = self.inner.batch_get_into(keys, objects)
            else:
                statuses = self.inner.batch_get_into(keys, objects)
            # whatever a hook left out: a page that nobody looked at is not proved
            unseen = [
                i
                for i, (status, seen) in enumerate(zip(statuses, proved, strict=True))
                if status and seen is None
            ]
            self._each(verify, unseen, sizes)
        statuses = [
            Status.CORRUPT if status and not true else status
            for status, true in zip(statuses, proved, strict=True)
        ]
        corrupt = [key for key, status in zip(keys, statuses, strict=True) if status is Status.CORRUPT]
        if corrupt:
            self._discard(corrupt)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        sizes = [page_nbytes(page) for page in pages]
        with self._arena.headers([self._header_nbytes(size) for size in sizes]) as headers:

            def fill(i: int) -> None:
                headers[i].view[:] = pack(keys[i], views(pages[i]), headers[i].nbytes)

            objects = _with_headers(headers, pages)
            if self.inner.capabilities.page_hook:
                with per_page(fill):
                    return self.inner.batch_set_from(keys, objects)
            self._each(fill, range(len(keys)), sizes)
            return self.inner.batch_set_from(keys, objects)

    def describe(self) -> dict[str, str]:
        return {**self.inner.describe(), "integrity": "xxh3-64 checked on every read"}

    def close(self) -> None:
        self._hashers.shutdown()
        self._arena.close()
        self.inner.close()

    def _header_nbytes(self, payload_nbytes: int) -> int:
        return header_nbytes(payload_nbytes, self.capabilities.alignment)

    def _each(self, work: Callable[[int], None], numbers: Sequence[int], sizes: Sequence[int]) -> None:
        if sum(sizes[i] for i in numbers) < PARALLEL_NBYTES:
            for i in numbers:
                work(i)
        else:
            for _ in self._hashers.map(work, numbers):
                pass

    def _discard(self, keys: Sequence[str]) -> None:
        logger.warning("%d corrupt objects will be written anew, the first is %s", len(keys), keys[0])
        if not self.capabilities.delete:
            return  # by contract such a backend overwrites on set
        try:
            self.inner.delete(keys)
        except StorageError as error:
            logger.warning("corrupt objects could not be removed: %s", error)


def _with_headers(headers: Sequence[Buffer], pages: Sequence[Page]) -> list[Page]:
    return [(header, *page) for header, page in zip(headers, pages, strict=True)]
