"""Runs the streams of a batch: in threads that their caller can leave, or in his own.

With a deadline, pages pass through slots and are touched only under a lease, which ends with the
deadline: a stream that hangs in the store keeps its thread and its slots, and nothing else. Without
one the caller waits as long as it takes, so pages are moved straight from and into his memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from hicache_storage import Buffer, Status
from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.deadline import time_left
from hicache_storage_nixl.slots import SlotMemory

WORTH_NBYTES = 8 << 20
"""A batch gets one more stream for so much: one copies while another waits."""

Slots: TypeAlias = list[Buffer] | None
"""Where pages pass through, one for each that may be in flight; None for the pages' own memory."""

Stream: TypeAlias = Callable[[Lease, Slots], None]
"""Moves pages of the batch until there are none left to start, or the lease is withdrawn."""


class Streams:
    """Threads and memory for one direction. Thread-safe."""

    def __init__(self, name: str, threads: int, memory: SlotMemory) -> None:
        self._pool = BatchPool(threads, name)
        self._threads = threads
        self._memory = memory

    def run(self, sizes: Sequence[int], at_most: int, stream: Stream, *, direct: bool) -> bool:
        """Have a batch of objects of these sizes (in bytes) moved by one or more streams.

        ``at_most``: pages in flight in one stream. ``direct``: the pages' own memory will do where the
        caller waits. False when the deadline passed first. Raises ClosedError.
        """
        if direct and time_left() is None:
            stream(Lease(), None)
            return True
        width = max(1, min(self._threads, len(sizes), sum(sizes) // WORTH_NBYTES))
        share = -(-len(sizes) // width)

        def work(_: int, lease: Lease) -> Status:
            with self._memory.slots(max(sizes, default=0), min(at_most, share)) as slots:
                stream(lease, slots)
            return Status.OK

        return Status.TIMED_OUT not in self._pool.run(width if sizes else 0, work)

    def close(self) -> None:
        """End the threads; one that is stuck in the store is left behind."""
        self._pool.close()


def live(todo: Iterator[int], lease: Lease) -> Iterator[int]:
    """What is left to do, which several streams share, as long as the batch's caller is there."""
    while not lease.withdrawn:
        number = next(todo, None)
        if number is None:
            return
        yield number
