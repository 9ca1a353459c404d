"""What is on its way between L2 and L3: prefetches that hold slots, backups that pin pages.

The controller's threads do the work and report it as events; here the tree, the slots and the counts
follow. One thread at a time.
"""

from __future__ import annotations

import time
from queue import Empty

from hicache_storage.engine.controller import BackupOperation, CacheController, Event, Released
from hicache_storage.engine.page_objects import Parts
from hicache_storage.engine.pools import HostPool
from hicache_storage.engine.prefetch import PrefetchOperation
from hicache_storage.engine.radix import HiRadixTree, Node, Tier
from hicache_storage.engine.report import Counts
from hicache_storage.storage import batches


class Traffic:
    """Between ``l2`` and ``controller``, while there is one."""

    def __init__(self, tree: HiRadixTree, l2: HostPool, counts: Counts) -> None:
        self.controller: CacheController | None = None
        self._tree = tree
        self._l2 = l2
        self._counts = counts
        self._prefetching = 0
        self._expected_events = 0

    @property
    def prefetching(self) -> int:
        """Slots of L2 that prefetches hold which nobody has collected yet."""
        return self._prefetching

    def prefetch(self, operation: PrefetchOperation) -> None:
        """Begin to read pages into the operation's slots."""
        assert self.controller is not None
        self._prefetching += len(operation.slots)
        self.controller.prefetch(operation)

    def collect(self, operation: PrefetchOperation) -> list[tuple[int, Parts]]:
        """Stop the prefetch; the L2 slot and the parts of each of its complete pages.

        The caller has to place or free the slots.
        """
        completed, free, in_flight = operation.stop()
        self._prefetching -= len(operation.slots)
        self._l2.free(free)
        self._expected_events += in_flight
        return list(zip(operation.slots, completed))  # noqa: B905 - the other slots are not complete

    def back_up(self, path: list[Node]) -> None:
        """Queue for L3 what L2 has of a path and L3 has not."""
        if self.controller is None:
            return
        for node in path:
            node.stored |= node.parts[Tier.L2] & ~self.controller.written  # another rank stores it
        missing = [node.parts[Tier.L2] & ~node.stored & ~node.backing_up for node in path]
        wanted = [index for index, parts in enumerate(missing) if parts]
        for batch in batches(len(wanted)):
            indices = wanted[batch]
            nodes = [path[index] for index in indices]
            parts = [missing[index] for index in indices]
            pinned = path[: indices[-1] + 1]
            for node, its_parts in zip(nodes, parts, strict=True):
                node.backing_up |= its_parts
            self._tree.pin(pinned, Tier.L2)
            self._expected_events += 1
            slots = [node.slot(Tier.L2) for node in nodes]
            self.controller.backup(BackupOperation(nodes, pinned, parts, slots))

    def settle(self, timeout: float | None) -> bool:
        """Wait until nothing is on its way to or from L3; False when ``timeout`` seconds passed."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        while self._expected_events:
            if not self._handle_event(ends_at):
                return False
        return True

    def forget(self) -> None:
        """There is no L3 any more, and the next one has none of the pages."""
        self.controller = None
        for node in self._tree.nodes():
            node.stored = 0

    def relieve(self, ends_at: float) -> bool:
        """Wait for a backup, or after ``ends_at`` drop one; False when there is none to drop."""
        if self._expected_events and self._handle_event(ends_at):
            return True
        dropped = self.controller.cancel_backup() if self.controller else None
        if dropped is None:
            return False
        self._backup_ended(dropped, [0] * len(dropped.nodes))
        return True

    def handle_events(self) -> None:
        """Act on what the controller has finished by now."""
        while self._expected_events and self._handle_event(time.monotonic()):
            pass

    def _handle_event(self, ends_at: float | None) -> bool:
        """Act on the next event of the controller; False when there is none by ``ends_at``."""
        assert self.controller is not None
        timeout = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        try:
            event: Event = self.controller.events.get(timeout=timeout)
        except Empty:
            return False
        if isinstance(event, Released):
            self._l2.free(event.slots)
            self._expected_events -= 1
        else:
            self._backup_ended(event.operation, event.stored)
        return True

    def _backup_ended(self, operation: BackupOperation, stored: list[Parts]) -> None:
        for node, wanted, parts in zip(operation.nodes, operation.wanted, stored, strict=True):
            node.backing_up &= ~wanted
            node.stored |= parts
            self._counts.backed_up += parts == wanted
            self._counts.backup_failed += parts != wanted
        self._tree.unpin(operation.path, Tier.L2)
        self._expected_events -= 1
