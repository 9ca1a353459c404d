"""Hybrid models: a prefix is restored only when every pool has what that prefix needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.outcomes import expect, expect_presence
from hicache_storage import DeadlineError, Page, Status
from hicache_storage.hybrid import HitPolicy, PoolPresence, restorable_prefixes
from hicache_storage.layers.layer import Layer

KV = (256, 256)
POOL = (64,)
BAD = {Status.CORRUPT, Status.MISSING, Status.FAILED, Status.TIMED_OUT}


@dataclass(frozen=True, slots=True)
class Pool:
    """A sidecar pool; its pages are called ``<page hash>.<suffix>``."""

    suffix: str
    policy: HitPolicy
    window: int = 1


POOLS = (
    Pool("index", HitPolicy.ALL_PAGES),
    Pool("swa", HitPolicy.TRAILING_PAGES, window=3),
    Pool("mamba", HitPolicy.TRAILING_PAGES),
)


def _names(hashes: Sequence[str], pool: Pool) -> list[str]:
    return [f"{page_hash}.{pool.suffix}" for page_hash in hashes]


def _restorable(kv: Sequence[bool], present: Sequence[Sequence[bool]]) -> int:
    """What the SDK says can be restored from these presences, in pages."""
    run = next((i for i, there in enumerate(kv) if not there), len(kv))
    pools = [
        PoolPresence(pool.suffix, pool.policy, there, window=pool.window)
        for pool, there in zip(POOLS, present, strict=True)
    ]
    return restorable_prefixes(run, pools).longest


def _by_brute_force(kv: Sequence[bool], present: Sequence[Sequence[bool]]) -> int:
    """The longest prefix for which every page that any pool needs is there; the definition itself."""
    for length in range(len(kv), 0, -1):
        needed = [kv[:length]]
        for pool, there in zip(POOLS, present, strict=True):
            start = 0 if pool.policy is HitPolicy.ALL_PAGES else max(0, length - pool.window)
            needed.append(there[start:length])
        if all(all(part) for part in needed):
            return length
    return 0


@case("hybrid")
def pools_have_pages_of_their_own(h: Harness) -> None:
    """The pages of several pools under one page hash are different objects, of different sizes.

    sglang#28258: a cleaner's key parser missed the pool suffixes. sglang#20880: L3 left the indexer out.
    """
    client, hashes = h.open(), h.names(6)
    h.store(client, hashes, KV)
    for pool in POOLS:
        names = _names(hashes, pool)
        expect_presence(client.batch_exists(client.keys(names)), [False] * 6, f"{pool.suffix} before set")
        h.store(client, names, POOL)
    for pool in POOLS:
        h.check(client, _names(hashes, pool), buffers=POOL)
    h.check(client, hashes, buffers=KV)


@case("hybrid", seconds=120)
def restorable_prefix_is_what_is_there(h: Harness) -> None:
    """Whatever pages of whatever pools are stored, the restorable prefix is that of a brute-force model.

    sglang#30738: KV was published beyond the sidecar's contiguous coverage.
    """
    stack = h.stack(exists_seconds=20, get_seconds=20, set_seconds=20)
    bitmaps = st.integers(2, 8).flatmap(
        lambda pages: st.lists(
            st.lists(st.sampled_from((True, True, True, False)), min_size=pages, max_size=pages),
            min_size=1 + len(POOLS),
            max_size=1 + len(POOLS),
        )
    )

    @seed(h.seed)
    @settings(
        max_examples=25,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(bitmaps)
    def compare(wanted: list[list[bool]]) -> None:
        hashes = h.names(len(wanted[0]))
        rows = [hashes, *(_names(hashes, pool) for pool in POOLS)]
        for row, (names, there) in enumerate(zip(rows, wanted, strict=True)):
            stored = [name for name, wish in zip(names, there, strict=True) if wish]
            if stored:
                h.store(stack, stored, POOL if row else KV)
        found = [stack.batch_exists(names) for names in rows]
        longest = _by_brute_force(wanted[0], wanted[1:])
        expect(_restorable(found[0], found[1:]), longest, "the restorable prefix")
        _read(h, stack, hashes[:longest], all_pools=False)

    compare()


def _read(h: Harness, stack: Client, hashes: Sequence[str], *, all_pools: bool) -> None:
    """Read what a restored prefix needs: all of it must be there and right."""
    if not hashes:
        return
    h.check(stack, hashes, buffers=KV)
    for pool in POOLS:
        whole = all_pools or pool.policy is HitPolicy.ALL_PAGES
        h.check(stack, _names(hashes if whole else hashes[-pool.window :], pool), buffers=POOL)


def _statuses(h: Harness, stack: Client, hashes: Sequence[str]) -> list[list[bool]]:
    """Read all pages of all pools; which of them came back."""
    either: list[Status | set[Status]] = [{Status.OK} | BAD] * len(hashes)
    rows = [h.check(stack, hashes, either, KV)]
    rows += [h.check(stack, _names(hashes, pool), either, POOL) for pool in POOLS]
    return [[bool(status) for status in row] for row in rows]


@case("hybrid")
def a_damaged_sidecar_shortens_the_prefix(h: Harness) -> None:
    """A damaged page of one pool is missing from the prefix, and nothing beyond it is restored.

    sglang#20880: silent corruption, since the KV was right and the index was not.
    """
    stack, hashes = h.stack(negative_ttl=0.0), h.names(6)
    h.store(stack, hashes, KV)
    for pool in POOLS:
        h.store(stack, _names(hashes, pool), POOL)
    backdoor = h.corruptor(stack)
    key = h.namespace.key(f"{hashes[4]}.index")
    raw = bytearray(backdoor.read(key) or b"?")
    raw[-1] ^= 1
    backdoor.write(key, bytes(raw))
    came = _statuses(h, stack, hashes)
    expect(_restorable(came[0], came[1:]), 4, "the restorable prefix with page 4 of the index damaged")
    _read(h, stack, hashes[:4], all_pools=True)


class _SlowPool(Layer):
    """One pool of the store does not answer in time."""

    def __init__(self, inner: Any, suffix: str) -> None:
        super().__init__(inner)
        self._suffix = suffix

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        if any(key.endswith(self._suffix) for key in keys):
            raise DeadlineError("the pool does not answer in time")
        return self.inner.batch_get_into(keys, pages)


@case("hybrid")
def completion_means_all_pools(h: Harness) -> None:
    """While one pool has not landed, no prefix that needs it is restored, whatever the others say.

    sglang#27504: garbled output; the prefetch ended before the extra pool's I/O had finished.
    """
    stack, hashes = h.stack(lambda storage: _SlowPool(storage, ".mamba"), breaker_cooldown=0.01), h.names(4)
    h.store(stack, hashes, KV)
    for pool in POOLS:
        h.store(stack, _names(hashes, pool), POOL)
    came = _statuses(h, stack, hashes)
    expect(_restorable(came[0], came[1:]), 0, "the restorable prefix while one pool is late")
