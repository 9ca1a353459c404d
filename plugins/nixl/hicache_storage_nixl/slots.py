"""Registered memory that pages pass through when their caller may take his own back at any moment.

A transfer that hangs keeps the slots of its stream until it is done, however late that is: they are
not used for anything else, and the caller's memory is never in its reach.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_storage import Buffer
from hicache_storage.directory.direct import ALIGNMENT
from hicache_storage_nixl.transfers import Transfers


class SlotMemory:
    """As much memory as streams need at a time, kept and registered until ``close``. Thread-safe."""

    def __init__(self, transfers: Transfers, stream_nbytes: int) -> None:
        """``stream_nbytes``: what a stream gets, unless one page alone needs more."""
        self._transfers = transfers
        self._stream_nbytes = stream_nbytes
        self._lock = threading.Lock()
        self._free: list[Buffer] = []

    @contextmanager
    def slots(self, nbytes: int, at_most: int) -> Iterator[list[Buffer]]:
        """Aligned slots of ``nbytes`` each for the time of a stream, at least one.

        Raises UnavailableError.
        """
        size = max(1, -(-nbytes // ALIGNMENT)) * ALIGNMENT
        whole = self._take(max(size, self._stream_nbytes))
        count = max(1, min(at_most, whole.nbytes // size))
        try:
            yield [whole.slice(i * size, nbytes) for i in range(count)]
        finally:
            with self._lock:
                self._free.append(whole)

    def close(self) -> None:
        """Unregister what is not in use."""
        with self._lock:
            free, self._free = self._free, []
        for whole in free:
            self._transfers.unregister(whole)

    def _take(self, nbytes: int) -> Buffer:
        with self._lock:
            for i, whole in enumerate(self._free):
                if whole.nbytes >= nbytes:
                    return self._free.pop(i)
            smaller = self._free.pop() if self._free else None
        if smaller is not None:
            self._transfers.unregister(smaller)
        whole = Buffer.allocate(nbytes)
        self._transfers.register(whole)
        return whole
