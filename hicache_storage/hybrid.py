"""Which prefixes of a hybrid model can be restored, when its pools hold different pages.

A hybrid model keeps more than KV per token range: a recurrent state (Mamba), a sliding window
(SWA), an index (DSA). A prefix is worth fetching only when every pool has what that prefix needs,
and different pools need different things. Publishing KV beyond what a sidecar covers serves
garbage (sglang issues 20880, 27504, 30738).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class HitPolicy(str, Enum):
    """What a pool must hold for a prefix of n pages; names and meaning are SGLang's."""

    ALL_PAGES = "all_pages"
    """Every page of [0, n): an index that is read at every position."""
    TRAILING_PAGES = "trailing_pages"
    """The last ``window`` pages of the prefix: a state, or a sliding window."""
    BLOCK_GROUPS = "block_groups"
    """Whole groups of keys, one group a block of pages; it reports, and never limits the prefix."""


@dataclass(frozen=True, slots=True)
class PoolPresence:
    """What one sidecar pool holds: ``present[i]`` for page i (for key i, with BLOCK_GROUPS)."""

    name: str
    policy: HitPolicy
    present: Sequence[bool]
    window: int = 1
    """Pages that must end the prefix, for TRAILING_PAGES."""
    block_pages: int = 0
    """Pages that one block covers, for BLOCK_GROUPS."""
    group_pages: int = 0
    """Keys in one group, for BLOCK_GROUPS."""


@dataclass(frozen=True, slots=True)
class Restorable:
    """What can be restored from the start of the sequence, in pages."""

    prefixes: tuple[int, ...]
    """Every restorable length, ascending; a window pool leaves holes, so ranks intersect these."""
    boundaries: dict[str, int]
    """For each pool the longest prefix it serves by itself."""

    @property
    def longest(self) -> int:
        """The longest restorable prefix, 0 when there is none."""
        return self.prefixes[-1] if self.prefixes else 0


def leading_run(present: Sequence[bool]) -> int:
    """How many pages are there before the first that is not."""
    for i, there in enumerate(present):
        if not there:
            return i
    return len(present)


def restorable_prefixes(kv_pages: int, pools: Sequence[PoolPresence]) -> Restorable:
    """What ``kv_pages`` leading pages of KV and these sidecar pools can restore together."""
    lengths = set(range(1, kv_pages + 1))
    boundaries = {}
    for pool in pools:
        if pool.policy is HitPolicy.BLOCK_GROUPS:
            boundaries[pool.name] = _covered_by_groups(pool)
            continue
        served = _served(pool, kv_pages)
        boundaries[pool.name] = max(served, default=0)
        lengths &= served
    return Restorable(tuple(sorted(lengths)), boundaries)


def _served(pool: PoolPresence, kv_pages: int) -> set[int]:
    """The prefix lengths, up to ``kv_pages``, for which this pool has what its policy asks."""
    if pool.policy is HitPolicy.ALL_PAGES:
        return set(range(1, min(leading_run(pool.present), kv_pages) + 1))
    served = set()
    run = 0
    for length in range(1, min(len(pool.present), kv_pages) + 1):
        run = run + 1 if pool.present[length - 1] else 0
        if run >= min(max(1, pool.window), length):
            served.add(length)
    return served


def _covered_by_groups(pool: PoolPresence) -> int:
    if pool.group_pages <= 0:
        return 0
    groups = len(pool.present) // pool.group_pages
    complete = (all(pool.present[g * pool.group_pages : (g + 1) * pool.group_pages]) for g in range(groups))
    return leading_run(list(complete)) * pool.block_pages
