"""One request on its way through the tiers: what is known of it, what is fetched, what is computed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_storage.engine.compute import Compute, Work
from hicache_storage.engine.loading import Loadings
from hicache_storage.engine.prefetch import PrefetchOperation, PrefetchPolicy
from hicache_storage.engine.radix import Node, Tier
from hicache_storage.engine.report import PrefillReport, Source
from hicache_storage.engine.tiers import Load, Tiers


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """A request that waits while its pages are on their way to L2. For ``prefill`` or ``cancel``."""

    hashes: list[str]
    known: list[Node]
    """The prefix that was in L1 or L2, pinned in L2."""
    operation: PrefetchOperation | None


def begin_prefetch(tiers: Tiers, policy: PrefetchPolicy, page_size: int, hashes: list[str]) -> Prefetch:
    """Pin what is known of a request, and begin to fetch the rest where that is worth it."""
    known = tiers.tree.match(hashes)
    tiers.tree.pin(known, Tier.L2)
    missing = hashes[len(known) :]
    worth_it = missing and len(missing) * page_size >= policy.threshold
    # room for all that is missing: what L3 does not have either needs it after the prefill
    return Prefetch(hashes, known, tiers.fetch(missing) if worth_it else None)


def give_up(tiers: Tiers, prefetch: Prefetch) -> None:
    """End a request that has waited for nothing."""
    tiers.tree.unpin(prefetch.known, Tier.L2)
    if prefetch.operation is not None:
        tiers.l2.free(tiers.collect(prefetch.operation))


class Prefill:
    """A request that runs: its ``path`` grows, pinned, until it has all full pages."""

    def __init__(self, tiers: Tiers, compute: Compute, policy: PrefetchPolicy, page_size: int) -> None:
        self._tiers = tiers
        self._compute = compute
        self._policy = policy
        self._page_size = page_size
        self._loads: dict[Source, Load] = {}
        self._seconds = dict.fromkeys(Source, 0.0)
        self._pages = dict.fromkeys(Source, 0)

    def run(self, tokens: Sequence[int], prefetch: Prefetch) -> PrefillReport:
        """Bring the pages into L1 from the nearest tier that has them, then down to L2 and L3."""
        tree = self._tiers.tree
        path = tree.match(prefetch.hashes)
        for tier in Tier:
            tree.pin(path, tier)
        tree.unpin(prefetch.known, Tier.L2)
        try:
            self._take_known(path)
            self._take_prefetched(path, prefetch)
            wrong = self._compute_rest(path, tokens, prefetch.hashes)
            self._tiers.write_through(path)
        finally:
            try:
                self._end_loads()
            finally:
                for tier in Tier:
                    tree.unpin(path, tier)
        sources = tuple(source for source in Source for _ in range(self._pages[source]))
        page_nbytes = self._tiers.page_nbytes
        return PrefillReport(len(tokens), self._page_size, page_nbytes, sources, self._seconds, wrong)

    def _take_known(self, path: list[Node]) -> None:
        self._pages[Source.L1] = sum(node.slots[Tier.L1] is not None for node in path)
        self._pages[Source.L2] = len(path) - self._pages[Source.L1]
        self._loads[Source.L2] = self._tiers.begin_load(path)

    def _take_prefetched(self, path: list[Node], prefetch: Prefetch) -> None:
        """Extend the path by the pages that have come, where they fit on to it."""
        operation = prefetch.operation
        if operation is None:
            return
        self._policy.wait(operation, self._page_size)
        slots = self._tiers.collect(operation)
        if slots:
            self._tiers.copy_to_l2(path)
        before = len(path)
        for index, slot in enumerate(slots, len(prefetch.known)):
            if index == len(path) and (not path or path[-1].slots[Tier.L2] is not None):
                self._tiers.tree.extend(path, prefetch.hashes[index], Tier.L2, slot)
                path[-1].in_l3 = True
            else:
                self._tiers.l2.free([slot])
        self._pages[Source.L3] = len(path) - before
        self._tiers.counts.prefetched += len(path) - before
        self._seconds[Source.L3] = operation.read_seconds
        self._loads[Source.L3] = self._tiers.begin_load(path[before:])

    def _compute_rest(self, path: list[Node], tokens: Sequence[int], hashes: list[str]) -> int:
        """Compute what no tier has, and check all pages; how many bytes are wrong."""
        cached = len(path)
        slots = self._tiers.l1_slots(len(hashes) - cached)
        loads = list(self._loads.values())
        loaded = [slot for load in loads for slot in load.slots]
        in_l1 = [node.slot(Tier.L1) for node in path[: cached - len(loaded)]]
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
        for page_hash, slot in zip(hashes[cached:], slots, strict=True):
            self._tiers.tree.extend(path, page_hash, Tier.L1, slot)
        self._pages[Source.RECOMPUTED] = len(slots)
        return self._compute.check(pages, work)

    def _end_loads(self) -> None:
        """Nothing is copied any more for this request, and what was copied is in L1."""
        loads, self._loads = self._loads, {}
        for source, seconds in zip(loads, self._tiers.end_loads(list(loads.values())), strict=True):
            self._seconds[source] += seconds
