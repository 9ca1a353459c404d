"""The cache controller: everything between L2 and the storage, on three threads of its own.

As in SGLang there is one query, one prefetch and one backup thread, which call the storage with
batches of at most 128 pages. They touch no tree and no free list: what they finish comes back as
events, and the engine's thread acts on these. Whatever a storage raises or answers wrongly is a miss.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from hicache_storage.buffers import Page
from hicache_storage.engine.prefetch import PrefetchOperation
from hicache_storage.engine.radix import Node
from hicache_storage.storage import HiCacheStorage, Status, batches

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackupOperation:
    """One batch of pages to write to L3. ``path`` is pinned in L2 until the end of it."""

    nodes: list[Node]
    path: list[Node]
    pages: Sequence[Page]


@dataclass(frozen=True, slots=True)
class BackedUp:
    """Event: a backup ended; one flag a page."""

    operation: BackupOperation
    stored: list[bool]


@dataclass(frozen=True, slots=True)
class Released:
    """Event: no call uses these L2 slots of a stopped prefetch any more."""

    slots: list[int]


Event: TypeAlias = BackedUp | Released


class Worker(Generic[T]):
    """A daemon thread that handles one item after the other and survives whatever that raises."""

    def __init__(self, name: str, handle: Callable[[T], None], discard: Callable[[T], None]) -> None:
        self._queue: SimpleQueue[T | None] = SimpleQueue()
        self._handle = handle
        self._discard = discard
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=f"hicache-{name}", daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """Queue an item."""
        self._queue.put(item)

    def take_back(self) -> T | None:
        """The oldest item that the thread has not begun, or None; it will not be handled."""
        try:
            return self._queue.get_nowait()
        except Empty:
            return None

    def close(self, timeout: float) -> bool:
        """Finish the item under way, discard the others; whether the thread ended in time."""
        self._closing = True
        self._queue.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._closing:
                self._discard(item)
                continue
            try:
                self._handle(item)
            except Exception:
                logger.exception("%s thread: an operation failed", threading.current_thread().name)


class CacheController:
    """Queries, prefetches and backups against ``storage``, which stays the caller's to close."""

    def __init__(self, storage: HiCacheStorage, min_prefetch_pages: int) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self._storage = storage
        self._min_prefetch_pages = min_prefetch_pages
        self._errors = {"query": 0, "prefetch": 0, "backup": 0}  # one writer each
        self._queries = Worker("query", self._query, _abandon)
        self._prefetches = Worker("prefetch", self._prefetch, _abandon)
        self._backups: Worker[BackupOperation] = Worker("backup", self._backup, lambda _operation: None)

    @property
    def storage_errors(self) -> int:
        """Calls that raised."""
        return sum(self._errors.values())

    def prefetch(self, operation: PrefetchOperation) -> None:
        """Look up the operation's pages, then read the leading ones that exist into their slots.

        ``operation.done`` is set when there is no more to come.
        """
        self._queries.put(operation)

    def backup(self, operation: BackupOperation) -> None:
        """Write the pages; a ``BackedUp`` event tells the end."""
        self._backups.put(operation)

    def cancel_backup(self) -> BackupOperation | None:
        """The oldest backup that has not begun, or None; there will be no event for it."""
        return self._backups.take_back()

    def close(self, timeout: float) -> bool:
        """End the threads after the calls in progress; operations that wait are dropped.

        False when a call did not return in time: the storage may still use pages then.
        """
        ends_at = time.monotonic() + timeout
        # in the order of the way of a prefetch, so that none is left between two threads
        workers = (self._queries, self._prefetches, self._backups)
        ended = [worker.close(max(0.0, ends_at - time.monotonic())) for worker in workers]
        self.events = SimpleQueue()  # what nobody will act on must not hold on to L2
        return all(ended)

    def _query(self, operation: PrefetchOperation) -> None:
        hits = 0
        for batch in batches(len(operation.hashes)):
            keys = operation.hashes[batch]
            found = self._call("query", self._storage.batch_exists, keys)
            run = leading(found[: len(keys)], bool)
            hits += run
            if run < len(keys):
                break
        if hits < max(1, self._min_prefetch_pages):
            operation.done.set()
            return
        operation.hashes = operation.hashes[:hits]
        self._prefetches.put(operation)

    def _prefetch(self, operation: PrefetchOperation) -> None:
        try:
            for batch in batches(len(operation.hashes)):
                if not operation.begin(batch):
                    break
                keys, pages = operation.hashes[batch], operation.pages[batch]
                began = time.perf_counter()
                statuses = self._call("prefetch", self._storage.batch_get_into, keys, pages)
                operation.read_seconds += time.perf_counter() - began
                run = leading(statuses[: len(keys)], lambda status: status is Status.OK)
                if released := operation.end(batch, run):
                    self.events.put(Released(released))
                if run < len(keys):
                    break
        finally:
            operation.done.set()

    def _backup(self, operation: BackupOperation) -> None:
        keys = [node.page_hash for node in operation.nodes]
        statuses = self._call("backup", self._storage.batch_set_from, keys, operation.pages)
        stored = [status is Status.OK for status in statuses[: len(keys)]]
        stored += [False] * (len(keys) - len(stored))
        self.events.put(BackedUp(operation, stored))

    def _call(self, worker: str, method: Callable[..., list[T]], *arguments: object) -> list[T]:
        """The storage's answer, or an empty one when it raises or is no list."""
        try:
            answer = method(*arguments)
        except Exception as error:
            self._errors[worker] += 1
            logger.warning("storage failed in %s: %s: %s", worker, type(error).__name__, error)
            return []
        return answer if isinstance(answer, list) else []


def leading(answers: Sequence[T], good: Callable[[T], bool]) -> int:
    """How many answers there are before the first that is not good."""
    for index, answer in enumerate(answers):
        if not good(answer):
            return index
    return len(answers)


def _abandon(operation: PrefetchOperation) -> None:
    operation.done.set()
