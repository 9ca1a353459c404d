"""Memory of each thread, and copies that let other threads run.

A request that is being sent cannot be called off, so it must not read from the caller's page:
pages pass through memory of the thread that sends them.
"""

from __future__ import annotations

import threading

from hicache_storage.buffers import Buffer


class ThreadMemory:
    """A piece of memory for each thread, as large as the largest page it has seen."""

    def __init__(self) -> None:
        self._mine = threading.local()

    def of(self, nbytes: int) -> Buffer:
        """The calling thread's memory, at least ``nbytes`` of it cut to size; reused by the next call."""
        memory: Buffer | None = getattr(self._mine, "memory", None)
        if memory is None or memory.nbytes < nbytes:
            memory = Buffer.allocate(max(nbytes, 1 << 16))
            self._mine.memory = memory
        return memory.slice(0, nbytes)
