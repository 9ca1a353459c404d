"""The slots of L1 and L2: who has them, who must leave, and what is copied between the two.

The tree says which pages are where, the pools which slots are free. This module keeps them in step, and
``traffic`` with L3. One thread at a time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from hicache_storage.engine.loading import Loading
from hicache_storage.engine.memory import Memory
from hicache_storage.engine.prefetch import PrefetchOperation
from hicache_storage.engine.radix import HiRadixTree, Node, Tier
from hicache_storage.engine.ranks import Ranks
from hicache_storage.engine.report import Counts
from hicache_storage.engine.side_pools import SidePools
from hicache_storage.engine.traffic import Traffic
from hicache_storage.engine.write_policy import WRITE_POLICIES, use, with_prefixes

_PREFETCH_SHARE = 0.8
"""Of the room that L2 has beyond L1, what waiting prefetches may hold before no more are begun: SGLang's
``prefetch_capacity_limit`` up to 0.5.14 (0.5.23 takes half of L2, and lets L2 be smaller than L1)."""


@dataclass(frozen=True, slots=True)
class Load:
    """Pages that only L2 has, on their way to slots of L1."""

    nodes: list[Node]
    slots: list[int]
    loading: Loading


class Tiers:
    """Pages in L1 and L2; ``traffic`` goes on between L2 and L3.

    ``sides`` are beside both tiers. The tiers of other ranks hold other pages, and ``ranks`` agree.
    ``write_policy`` names one of WRITE_POLICIES. ``backup_wait``: seconds that a request may wait for
    room in L2 before backups are dropped.
    """

    def __init__(
        self,
        memory: Memory,
        write_policy: str,
        backup_wait: float,
        sides: SidePools,
        ranks: Ranks,
    ) -> None:
        self.l1, self.l2, self.transfer = memory.l1, memory.l2, memory.transfer
        self.sides = sides
        self.ranks = ranks
        self.tree = HiRadixTree()
        self.counts = Counts()
        self.traffic = Traffic(self.tree, self.l2, self.counts)
        self._hits_to_copy = WRITE_POLICIES[write_policy]
        self._backup_wait = backup_wait

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page."""
        return self.l2.nbytes // self.l2.slots

    def l1_slots(self, count: int) -> list[int]:
        """Slots of L1, taken from other requests' pages if need be."""
        self._leave_l1(count - self.l1.free_slots)
        slots = [self.l1.alloc() for _ in range(count)]
        # only the request that runs pins L1, and it fits
        return sorted(slot for slot in slots if slot is not None)  # neighbours are copied as one

    def l2_slots(self, count: int) -> list[int]:
        """Slots of L2, fewer than ``count`` when all the others stay in use."""
        self.traffic.handle_events()
        ends_at = time.monotonic() + self._backup_wait
        slots: list[int] = []
        while len(slots) < count:
            slot = self.l2.alloc()
            if slot is None:
                slot = self._evict(Tier.L2)
            if slot is not None:
                slots.append(slot)
            elif not self.traffic.relieve(ends_at):
                break
        return sorted(slots)

    def begin_load(self, path: list[Node]) -> Load:
        """Begin to copy to L1 what only L2 has of a part of a pinned path, which stays pinned meanwhile."""
        nodes = [node for node in path if node.slots[Tier.L1] is None]
        slots = self.l1_slots(len(nodes))
        try:
            loading = self.transfer.load([node.slot(Tier.L2) for node in nodes], slots)
        except BaseException:
            self.l1.free(slots)
            raise
        return Load(nodes, slots, loading)

    def end_loads(self, loads: list[Load]) -> list[float]:
        """Wait for the loads of a path, root first; their seconds. Only then are their pages in L1.

        Raises what a copy raised, and then no page of any of them is.
        """
        seconds = []
        failed: Exception | None = None
        for load in loads:
            try:
                seconds.append(load.loading.wait())
            except Exception as error:  # an interrupt leaves the slots to the copy that goes on
                failed = error
        for load in loads:
            if failed is not None:
                self.l1.free(load.slots)
                continue
            for node, slot in zip(load.nodes, load.slots, strict=True):
                self.tree.place(node, Tier.L1, slot)
        if failed is not None:
            raise failed
        return seconds

    def copy_to_l2(self, path: list[Node]) -> None:
        """Copy to L2 what only L1 has of a pinned path, from the root on as far as there is room."""
        nodes = [node for node in path if node.slots[Tier.L2] is None]
        slots = self.l2_slots(len(nodes))
        nodes = nodes[: len(slots)]
        try:
            self.transfer.store([node.slot(Tier.L1) for node in nodes], slots)
        except BaseException:
            self.l2.free(slots)
            raise
        for node, slot in zip(nodes, slots, strict=True):
            self.tree.place(node, Tier.L2, slot)
        self.sides.store(path)
        self.counts.copied_to_l2 += len(nodes)

    def write_through(self, path: list[Node]) -> None:
        """Count a request's use of its pages, and copy down those that the write policy asks for."""
        wanted = use(path, self._hits_to_copy)
        self.copy_to_l2(wanted)
        self.counts.dropped += sum(node.slots[Tier.L2] is None for node in wanted)
        self.traffic.back_up(path)

    def flush(self, tier: Tier) -> int:
        """Evict everything that is not in use; how many pages left."""
        self.traffic.handle_events()
        if tier is Tier.L1:
            return self._leave_l1(self.l1.slots)
        slots = list(iter(lambda: self._evict(tier), None))
        self.l2.free(slots)
        return len(slots)

    def restorable(self, path: list[Node]) -> tuple[int, ...]:
        """The lengths, ascending, of the prefixes of ``path`` that a request can go on from."""
        return self.sides.restorable([node.parts[Tier.L1] | node.parts[Tier.L2] for node in path])

    def fetch(self, hashes: list[str], known: list[Node], min_pages: int) -> PrefetchOperation | None:
        """Begin to read what follows ``known`` into L2, as much as there is room for.

        None without L3, when it is less than ``min_pages``, and when limited. Among several ranks there is
        an operation all the same, with no room: the others may have more to ask for.
        """
        if self.traffic.controller is None:
            return None
        missing = len(hashes) - len(known)
        is_wanted = missing >= max(1, min_pages)
        share = _PREFETCH_SHARE * (self.l2.slots - self.l1.slots)
        if is_wanted and self.traffic.prefetching >= share:
            self.counts.prefetch_limited += missing
            is_wanted = False
        if not (is_wanted or (hashes and self.ranks.place.count > 1)):
            return None
        # room for all that is missing: what L3 does not have either needs it after the prefill
        slots = self.l2_slots(missing) if is_wanted else []
        parts = [node.parts[Tier.L1] | node.parts[Tier.L2] for node in known]
        operation = PrefetchOperation(hashes, parts, slots)
        self.traffic.prefetch(operation)
        return operation

    def _leave_l1(self, count: int) -> int:
        """Evict the ``count`` least recently used pages from L1, if there are as many; how many left."""
        leaving = self.tree.oldest(Tier.L1, max(0, count))
        if self._hits_to_copy is None:
            self._write_back([node for node in leaving if node.parts[Tier.L1] & ~node.parts[Tier.L2]])
        for _ in leaving:
            slot = self._evict(Tier.L1)
            assert slot is not None
            self.l1.free([slot])
        return len(leaving)

    def _write_back(self, leaving: list[Node]) -> None:
        """Copy pages to L2, and the pages before them, as far as there is room."""
        together = with_prefixes(self.tree, leaving)
        self.tree.pin(together, Tier.L2)
        self.copy_to_l2(together)
        self.traffic.back_up(together)
        self.counts.dropped += sum(node.slots[Tier.L2] is None for node in leaving)
        self.tree.unpin(together, Tier.L2)

    def _evict(self, tier: Tier) -> int | None:
        """The slot that the least recently used page leaves; None when all are in use."""
        evicted = self.tree.evict(tier)
        if evicted is None:
            return None
        node, slot = evicted
        if tier is Tier.L1:
            self.counts.l1_evicted += 1
            self.counts.forgotten += node.slots[Tier.L2] is None and not node.in_l3
        else:
            self.counts.l2_evicted += 1
            self.counts.dropped += self.traffic.controller is not None and not node.in_l3
        return slot
