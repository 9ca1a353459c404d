"""Threads that work through a batch page by page, and let go of the caller's memory on time.

A read blocked in the kernel cannot be called off, so a bounded backend must not let it point into
memory that its caller takes back at the deadline. Every page of a batch comes with a ``Lease``:
work touches the page only inside ``lease.held()``, for steps that cannot block, and whatever can
block goes through memory of its own. At the deadline the leases are withdrawn and the caller
returns; the thread that is still stuck finds its lease gone and drops its bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeAlias, TypeVar

from hicache_storage.deadline import deadline, time_left
from hicache_storage.errors import ClosedError, DeadlineError, StorageError
from hicache_storage.storage import Status

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Lease:
    """Permission to touch one page's memory; the batch's caller withdraws it at the deadline."""

    __slots__ = ("_live", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Touch the page inside, in a step that cannot block. Raises DeadlineError once withdrawn."""
        with self._lock:
            if not self._live:
                raise DeadlineError("the caller has taken its memory back")
            yield

    @property
    def withdrawn(self) -> bool:
        """Whether the page's caller has gone: there is no use in going on."""
        return not self._live

    def withdraw(self) -> None:
        """Returns when nothing touches the page and nothing will."""
        with self._lock:
            self._live = False


Work: TypeAlias = Callable[[int, Lease], Status]
"""Does page ``i`` of a batch; may raise StorageError."""


class _Batch:
    """One batch in progress: what is left to take, what came back."""

    def __init__(self, count: int, work: Work) -> None:
        self.work = work
        self.results: list[Status | None] = [None] * count
        self.leases = [Lease() for _ in range(count)]
        self.done = threading.Event()
        left = time_left()
        self._ends_at = None if left is None else time.monotonic() + left
        self._indices = iter(range(count))
        self._left = count
        self._lock = threading.Lock()

    def drain(self) -> None:
        """Take pages until there are none; runs in several threads at once."""
        for index in self._indices:  # next() on a range iterator is atomic under the GIL
            if self.leases[index].withdrawn:
                return
            try:
                with deadline(None if self._ends_at is None else self._ends_at - time.monotonic()):
                    status = self.work(index, self.leases[index])
            except StorageError as error:
                status = Status.of(error)
            except Exception:
                logger.exception("a page of a batch failed in an unforeseen way")
                status = Status.FAILED
            self.results[index] = status
            with self._lock:
                self._left -= 1
                if self._left == 0:
                    self.done.set()


class BatchPool:
    """``threads`` daemon threads shared by all batches of one backend.

    Daemon, because a thread stuck in a dead device must not keep the process from ending.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, count: int, work: Work, width: int | None = None) -> list[Status]:
        """Do pages 0..count-1 and answer for each, by ``time_left()`` at the latest.

        A page that is not done by then is TIMED_OUT, and its work cannot touch the page any more.
        At most ``width`` threads work on it, all of them by default.
        """
        batch = _Batch(count, work)
        with self._lock:
            if self._closed:
                raise ClosedError("the storage is closed")
            for _ in range(min(count, width or count, len(self._threads))):
                self._queue.put(batch)
        if count == 0:
            return []
        if not batch.done.wait(time_left()):
            for lease in batch.leases:
                lease.withdraw()
        return [Status.TIMED_OUT if status is None else status for status in batch.results]

    def call(self, work: Callable[[Lease], T], late: Callable[[T], None] | None = None) -> T:
        """What ``work`` returns or raises, by ``time_left()`` at the latest.

        Raises DeadlineError when it takes longer; ``late`` then gets what it returns in the end.
        """
        returned: list[T] = []
        raised: list[Exception] = []

        def once(_: int, lease: Lease) -> Status:
            try:
                value = work(lease)
            except Exception as error:
                raised.append(error)
                return Status.OK
            try:
                with lease.held():
                    returned.append(value)
            except DeadlineError:
                if late is not None:
                    late(value)
            return Status.OK

        self.run(1, once)
        if returned:
            return returned[0]
        if raised:
            raise raised[0]
        raise DeadlineError("the store did not answer in time")

    def close(self, timeout: float = 5.0) -> None:
        """Finish the batches in progress, then end the threads.

        A thread that is stuck in the store is left behind after ``timeout`` seconds.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in self._threads:
                self._queue.put(None)
        ends_at = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, ends_at - time.monotonic()))
        if stuck := sum(thread.is_alive() for thread in self._threads):
            logger.warning("%d I/O threads are stuck in the store and were left behind", stuck)

    def _serve(self) -> None:
        while (batch := self._queue.get()) is not None:
            batch.drain()
            del batch  # an idle thread must not keep the caller's memory alive
