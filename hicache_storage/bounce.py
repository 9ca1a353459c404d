"""Memory of our own that pages pass through when the caller's cannot be used directly.

Each thread has one piece, registered with the backend like L2, so a backend that insists on
registered memory works behind it. Batches are cut to fit, which caps the extra memory at
``BOUNCE_NBYTES`` a thread (or one page, where a page is larger).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hicache_storage.buffers import Buffer
from hicache_storage.storage import HiCacheStorage

BOUNCE_NBYTES = 16 << 20
ALIGNMENT = 4096


def cut(sizes: Sequence[int]) -> Iterator[slice]:
    """Slices of a batch of pages of these sizes (in bytes) that each fit the bounce memory."""
    start, nbytes = 0, 0
    for i, size in enumerate(map(_aligned, sizes)):
        if i > start and nbytes + size > BOUNCE_NBYTES:
            yield slice(start, i)
            start, nbytes = i, 0
        nbytes += size
    if start < len(sizes):
        yield slice(start, len(sizes))


class BounceMemory:
    """One registered piece of memory for each thread that asks."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._registered: list[Buffer] = []

    def pages(self, sizes: Sequence[int]) -> list[Buffer]:
        """The calling thread's memory as one aligned buffer a page; the next call overwrites it."""
        offsets = [0, *accumulate(map(_aligned, sizes))]
        memory = self._memory(max(offsets[-1], BOUNCE_NBYTES))
        return [memory.slice(offset, size) for offset, size in zip(offsets, sizes, strict=False)]

    def close(self) -> None:
        """Unregister all of it; no call may be in progress."""
        with self._lock:
            registered, self._registered = self._registered, []
        for memory in registered:
            self._storage.unregister_buffer(memory)

    def _memory(self, nbytes: int) -> Buffer:
        mine: Buffer | None = getattr(self._mine, "memory", None)
        if mine is not None and mine.nbytes >= nbytes:
            return mine
        if mine is not None:
            self._storage.unregister_buffer(mine)
        grown = Buffer.allocate(nbytes)
        self._storage.register_buffer(grown)
        with self._lock:
            self._registered = [memory for memory in self._registered if memory is not mine] + [grown]
        self._mine.memory = grown
        return grown


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
