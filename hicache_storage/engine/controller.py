"""The cache controller: everything between L2 and the storage, on three threads of its own.

As in SGLang there is one query, one prefetch and one backup thread, which call the storage with
batches of at most 128 pages. They touch no tree and no free list: what they finish comes back as
events, and the engine's thread acts on these.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, TypeAlias, TypeVar

from hicache_storage.engine.page_objects import KV, PageObjects, Parts
from hicache_storage.engine.prefetch import PrefetchOperation
from hicache_storage.engine.radix import Node
from hicache_storage.engine.ranks import Asking, Ranks, RanksError, as_flags, longest_of
from hicache_storage.hybrid import leading_run
from hicache_storage.storage import batches

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackupOperation:
    """One batch of pages to write to L3. ``path`` is pinned in L2 until the end of it."""

    nodes: list[Node]
    path: list[Node]
    wanted: list[Parts]
    slots: list[int]


@dataclass(frozen=True, slots=True)
class BackedUp:
    """Event: a backup ended; what is stored of each page."""

    operation: BackupOperation
    stored: list[Parts]


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
            try:
                (self._discard if self._closing else self._handle)(item)
            except Exception:
                logger.exception("%s thread: an operation failed", threading.current_thread().name)


class CacheController:
    """Queries, prefetches and backups of ``objects``.

    ``restorable`` tells the prefix lengths that can be restored of pages that have these parts;
    ``ranks`` agree on one of them, and it is fetched when it gains ``min_prefetch_pages``.
    """

    def __init__(
        self,
        objects: PageObjects,
        min_prefetch_pages: int,
        restorable: Callable[[Sequence[Parts]], Sequence[int]],
        ranks: Ranks,
    ) -> None:
        self.events: SimpleQueue[Event] = SimpleQueue()
        self.written = objects.written
        self._objects = objects
        self._min_prefetch_pages = min_prefetch_pages
        self._restorable = restorable
        self._ranks = ranks
        self._queries = Worker("query", self._query, self._query_nothing)
        self._prefetches = Worker("prefetch", self._prefetch, _abandon)
        self._backups: Worker[BackupOperation] = Worker("backup", self._backup, lambda _operation: None)

    @property
    def storage_errors(self) -> int:
        """Calls that raised."""
        return self._objects.errors

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
        wanted: Sequence[Parts] = []
        try:
            wanted = self._worth_reading(operation)
        except RanksError as error:
            logger.debug("%s", error)  # the request's own thread raises it
        finally:
            operation.narrow(wanted)
            self._prefetches.put(operation)

    def _query_nothing(self, operation: PrefetchOperation) -> None:
        """The other ranks ask about this request too, and one that is missing would hold them up."""
        operation.stop()
        self._query(operation)

    def _worth_reading(self, operation: PrefetchOperation) -> Sequence[Parts]:
        """The parts of the pages that all ranks are going to read."""
        start = len(operation.known)
        parts = [*operation.known, *self._in_l3(operation)]
        flags = as_flags(self._restorable(parts), len(operation.request))
        known, *agreed = self._ranks.agree(Asking.LOOKUP, operation.request[-1], [start, *flags])
        end = longest_of(agreed)
        is_worth_it = end - known >= max(1, self._min_prefetch_pages)
        return parts[start:end] if is_worth_it else []

    def _in_l3(self, operation: PrefetchOperation) -> list[Parts]:
        """What L3 has of the operation's leading pages."""
        parts: list[Parts] = []
        for batch in batches(len(operation.hashes)):
            if operation.is_stopped:
                break
            found = self._objects.exists(operation.hashes[batch])
            run = leading_run([bool(have & KV) for have in found])
            parts += found[:run]
            if run < len(found):
                break
        return parts

    def _prefetch(self, operation: PrefetchOperation) -> None:
        try:
            for batch in batches(len(operation.hashes)):
                if not operation.begin(batch):
                    break
                hashes, slots = operation.hashes[batch], operation.slots[batch]
                began = time.perf_counter()
                got = self._objects.get(hashes, operation.wanted[batch], slots)
                operation.read_seconds += time.perf_counter() - began
                run = leading_run([bool(have & KV) for have in got])
                if released := operation.end(batch, got[:run]):
                    self.events.put(Released(released))
                if run < len(hashes):
                    break
        finally:
            operation.done.set()

    def _backup(self, operation: BackupOperation) -> None:
        hashes = [node.page_hash for node in operation.nodes]
        stored = self._objects.set(hashes, operation.wanted, operation.slots)
        self.events.put(BackedUp(operation, stored))


def _abandon(operation: PrefetchOperation) -> None:
    operation.done.set()
