"""One request on its way through the tiers: what is known of it, what is fetched, what is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_storage.engine.compute import Compute, Work
from hicache_storage.engine.loading import Loadings
from hicache_storage.engine.prefetch import PrefetchOperation, PrefetchPolicy
from hicache_storage.engine.radix import Node, Tier
from hicache_storage.engine.ranks import Asking, as_flags, longest_of
from hicache_storage.engine.report import PrefillReport, Source
from hicache_storage.engine.tiers import Load, Tiers


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """A request that waits while its pages are on their way to L2. For ``prefill`` or ``cancel``."""

    hashes: list[str]
    known: list[Node]
    """The restorable prefix that was in L1 or L2, pinned in L2."""
    operation: PrefetchOperation | None


def begin_prefetch(tiers: Tiers, policy: PrefetchPolicy, page_size: int, hashes: list[str]) -> Prefetch:
    """Pin what is known of a request, and begin to fetch the rest where that is worth it."""
    path = tiers.tree.match(hashes)
    known = path[: max(tiers.restorable(path), default=0)]
    tiers.tree.pin(known, Tier.L2)
    return Prefetch(hashes, known, tiers.fetch(hashes, known, -(-policy.threshold // page_size)))


def give_up(tiers: Tiers, prefetch: Prefetch) -> None:
    """End a request that has waited for nothing."""
    tiers.tree.unpin(prefetch.known, Tier.L2)
    if prefetch.operation is not None:
        tiers.l2.free(slot for slot, _ in tiers.traffic.collect(prefetch.operation))


class Prefill:
    """A request that runs: its ``path`` grows, pinned, until it has all full pages."""

    def __init__(self, tiers: Tiers, compute: Compute, policy: PrefetchPolicy, page_size: int) -> None:
        self._tiers = tiers
        self._compute = compute
        self._policy = policy
        self._page_size = page_size
        self._known = 0
        self._loads: dict[Source, Load] = {}
        self._seconds = dict.fromkeys(Source, 0.0)

    def run(self, tokens: Sequence[int], prefetch: Prefetch) -> PrefillReport:
        """Bring the pages into L1 from the nearest tier that has them, then down to L2 and L3."""
        tree = self._tiers.tree
        path = tree.match(prefetch.hashes)
        for tier in Tier:
            tree.pin(path, tier)
        tree.unpin(prefetch.known, Tier.L2)
        try:
            sources = self._take_known(path)
            self._take_prefetched(path, prefetch)
            cached = self._agree(path, prefetch.hashes)
            sources = sources[:cached] + [Source.L3] * (cached - len(sources))
            self._tiers.counts.prefetched += sources.count(Source.L3)
            wrong = self._compute_rest(path, cached, tokens, prefetch.hashes)
            self._tiers.write_through(path)
        finally:
            try:
                self._end_loads()
            finally:
                for tier in Tier:
                    tree.unpin(path, tier)
        sources += [Source.RECOMPUTED] * (len(prefetch.hashes) - cached)
        page_nbytes = self._tiers.page_nbytes
        return PrefillReport(len(tokens), self._page_size, page_nbytes, tuple(sources), self._seconds, wrong)

    def _take_known(self, path: list[Node]) -> list[Source]:
        """Begin to load the prefix that L1 and L2 can restore; where each page of it was."""
        known = path[: max(self._tiers.restorable(path), default=0)]
        self._known = len(known)
        self._loads[Source.L2] = self._tiers.begin_load(known)
        return [Source.L2 if node.slots[Tier.L1] is None else Source.L1 for node in known]

    def _take_prefetched(self, path: list[Node], prefetch: Prefetch) -> None:
        """Extend the path by the pages that have come, where they fit on to it.

        Of pages that it has, they may bring parts that it lacks.
        """
        operation = prefetch.operation
        if operation is None:
            return
        self._policy.wait(operation, self._page_size)
        pages = self._tiers.traffic.collect(operation)
        if pages:
            self._tiers.copy_to_l2(path)
        for index, (slot, parts) in enumerate(pages, len(prefetch.known)):
            if index == len(path) and (not path or path[-1].slots[Tier.L2] is not None):
                self._tiers.tree.extend(path, prefetch.hashes[index], Tier.L2, slot)
                path[-1].parts[Tier.L2] = path[-1].stored = parts
                continue
            if index < len(path) and path[index].slots[Tier.L2] is not None:
                self._tiers.sides.adopt(path[index], slot, parts)
                path[index].stored |= parts
            self._tiers.l2.free([slot])
        self._seconds[Source.L3] = operation.read_seconds

    def _agree(self, path: list[Node], hashes: list[str]) -> int:
        """The longest prefix, in pages, that this rank and all others can restore."""
        flags = as_flags(self._tiers.restorable(path), len(hashes))
        about = f"the request of page {hashes[-1]}" if hashes else "a request without a full page"
        return longest_of(self._tiers.ranks.agree(Asking.REQUEST, about, flags))

    def _compute_rest(self, path: list[Node], cached: int, tokens: Sequence[int], hashes: list[str]) -> int:
        """Compute what is not cached, and check all pages; how many bytes are wrong.

        Pages that this rank has, but not all ranks or not with all parts, are computed in place.
        """
        if cached < self._known:  # and nothing may be computed where a load still writes
            self._end_loads()
        self._loads[Source.L3] = self._tiers.begin_load(path[self._known : cached])
        loads = list(self._loads.values())
        loaded = [slot for load in loads for slot in load.slots]
        in_l1 = [node.slot(Tier.L1) for node in path if node.slots[Tier.L1] is not None]
        slots = self._tiers.l1_slots(len(hashes) - len(in_l1) - len(loaded))
        loading = Loadings([load.loading for load in loads])
        work = Work(tokens, hashes, [*in_l1, *loaded, *slots], cached, loading)
        pages = self._tiers.l1.pages
        began = time.perf_counter()
        try:
            self._compute.compute(pages, work)
            self._end_loads()
        except BaseException:
            self._tiers.l1.free(slots)
            raise
        self._seconds[Source.RECOMPUTED] = time.perf_counter() - began
        for index, slot in enumerate(slots, len(hashes) - len(slots)):
            if index < len(path):
                self._tiers.tree.place(path[index], Tier.L1, slot)
            else:
                self._tiers.tree.extend(path, hashes[index], Tier.L1, slot)
        self._tiers.sides.load(path[:cached])
        self._tiers.sides.compute(path, cached)
        return self._compute.check(pages, work) + self._tiers.sides.wrong_bytes(path, cached)

    def _end_loads(self) -> None:
        """Nothing is copied any more for this request, and what was copied is in L1."""
        loads, self._loads = self._loads, {}
        for source, seconds in zip(loads, self._tiers.end_loads(list(loads.values())), strict=True):
            self._seconds[source] += seconds
