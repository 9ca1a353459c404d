"""What a hybrid model keeps beside KV: a recurrent state, a sliding window, an index.

A side pool has a slot for every page slot, in L1 and in L2, under the same number, so it needs no
free list and no eviction of its own: what a page has of it comes, is copied and leaves with the
page. That costs memory for pages that have nothing there, and buys that no tier ever holds a state
without its KV. SGLang sizes these pools apart and evicts them alone (``hybrid_cache_controller.py``).

Which pages have something is the pool's policy: an index all pages, a state or a window the last
pages of each request. So a prefix of KV can be longer than any prefix that can be continued from;
``restorable`` says which can, and nothing else is ever taken from a tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from hicache_storage.buffers import Buffer
from hicache_storage.engine.layouts import PAGE_FIRST, find_layout
from hicache_storage.engine.options import EngineOptions
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_objects import Part, Parts
from hicache_storage.engine.pools import DevicePool, HostPool
from hicache_storage.engine.radix import Node, Tier
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.transfer import open_transfer
from hicache_storage.errors import SettingsError
from hicache_storage.hybrid import HitPolicy, PoolPresence, restorable_prefixes
from hicache_storage.storage import HiCacheStorage


@dataclass(frozen=True, slots=True)
class SidePool:
    """A pool beside KV. Like KV, an ``mha`` shape is cut among tensor parallel ranks, ``mla`` is not.

    Raises SettingsError for a name that is no part of a key, and for a window without pages.
    """

    name: str
    shape: KVShape
    """Of the whole model: of each token, or of the one state at the end of a page."""
    policy: HitPolicy
    window: int = 1
    """Pages that must end a prefix, for TRAILING_PAGES."""
    is_state: bool = False
    """One entry a page, not one a token."""

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isidentifier()):
            raise SettingsError(f"side pool {self.name!r}: a name is made of letters, digits and '_'")
        if self.policy is HitPolicy.BLOCK_GROUPS:
            raise SettingsError(f"side pool {self.name}: the engine has no block groups")
        if self.window < 1:
            raise SettingsError(f"side pool {self.name}: a window has at least one page, not {self.window}")

    @classmethod
    def mamba(cls, shape: KVShape) -> SidePool:
        """Recurrent states, one at the end of each request's last full page."""
        return cls("mamba", shape, HitPolicy.TRAILING_PAGES, is_state=True)

    @classmethod
    def swa(cls, shape: KVShape, window: int) -> SidePool:
        """KV of the layers with a sliding window of ``window`` pages."""
        return cls("swa", shape, HitPolicy.TRAILING_PAGES, window)

    @classmethod
    def indexer(cls, shape: KVShape) -> SidePool:
        """Index keys of sparse attention (DSA), read at every position."""
        return cls("indexer", shape, HitPolicy.ALL_PAGES)

    def tokens(self, page_size: int) -> int:
        """Entries of a page."""
        return 1 if self.is_state else page_size

    def pages_for(self, cached: int) -> range:
        """Which pages of this pool a prefix of ``cached`` pages needs."""
        return range(0 if self.policy is HitPolicy.ALL_PAGES else max(0, cached - self.window), cached)

    def pages_of(self, cached: int, pages: int) -> range:
        """Which pages a request of ``pages`` leaves in this pool when ``cached`` need no computing."""
        if self.policy is HitPolicy.ALL_PAGES:
            return range(cached, pages)
        return range(max(cached, pages - self.window), pages)


class SidePools:
    """The side pools of one rank, cut as its ``kv`` is; one thread at a time.

    Part i + 1 of a page is what pool i has of it; ``Node.parts`` says in which tier.
    """

    def __init__(
        self,
        pools: Sequence[SidePool],
        kv: Shard,
        options: EngineOptions,
        slots: tuple[int, int],
        device: torch.device,
    ) -> None:
        names = [pool.name for pool in pools]
        if len(set(names)) < len(names):
            raise SettingsError(f"two side pools have one name: {', '.join(names)}")
        self.pools = tuple(pools)
        self._opened: list[_Opened] = []
        try:
            for index, pool in enumerate(pools, 1):
                self._opened.append(_Opened(1 << index, pool, kv, options, slots, device))
        except BaseException:
            self.close()
            raise

    @property
    def buffers(self) -> list[Buffer]:
        """The memory of L2, to be registered with the storage."""
        return [opened.l2.buffer for opened in self._opened]

    def parts(self, storage: HiCacheStorage) -> list[Part]:
        """What these pools have of a page in ``storage``."""
        return [opened.part(storage) for opened in self._opened]

    def restorable(self, parts: Sequence[Parts]) -> tuple[int, ...]:
        """The lengths, ascending, of the prefixes that KV and all pools can restore, of pages that have
        ``parts``. Any thread.
        """
        presence = [
            PoolPresence(pool.name, pool.policy, [bool(have >> index & 1) for have in parts], pool.window)
            for index, pool in enumerate(self.pools, 1)
        ]
        return restorable_prefixes(len(parts), presence).prefixes

    def load(self, path: Iterable[Node]) -> None:
        """Copy to L1 what only L2 has of pages that are in both."""
        for opened in self._opened:
            nodes = opened.only_in(Tier.L2, path)
            opened.transfer.load(_slots(nodes, Tier.L2), _slots(nodes, Tier.L1)).wait()
            opened.add(nodes, Tier.L1)

    def store(self, path: Iterable[Node]) -> None:
        """Copy to L2 what only L1 has of pages that are in both."""
        for opened in self._opened:
            nodes = opened.only_in(Tier.L1, path)
            opened.transfer.store(_slots(nodes, Tier.L1), _slots(nodes, Tier.L2))
            opened.add(nodes, Tier.L2)

    def adopt(self, node: Node, slot: int, parts: Parts) -> None:
        """Take what L2 has in ``slot`` of a page that is in L2 already, and that the page lacks."""
        for opened in self._opened:
            if parts & opened.bit & ~node.parts[Tier.L2]:
                opened.l2.pages[node.slot(Tier.L2)] = opened.l2.pages[slot]
                opened.add([node], Tier.L2)

    def compute(self, path: Sequence[Node], cached: int) -> None:
        """Write to L1 what a request leaves in these pools, after ``cached`` pages."""
        for opened in self._opened:
            made = opened.pool.pages_of(cached, len(path))
            nodes = path[made.start : made.stop]
            opened.oracle.fill(opened.l1.pages, _slots(nodes, Tier.L1), [node.page_hash for node in nodes])
            opened.add(nodes, Tier.L1)

    def wrong_bytes(self, path: Sequence[Node], cached: int) -> int:
        """How many bytes are wrong in L1, of what it has and of what ``cached`` pages need."""
        wrong = 0
        for opened in self._opened:
            needed = opened.pool.pages_for(cached)
            nodes = [node for i, node in enumerate(path) if i in needed or node.parts[Tier.L1] & opened.bit]
            hashes = [node.page_hash for node in nodes]
            wrong += opened.oracle.wrong_bytes(opened.l1.pages, _slots(nodes, Tier.L1), hashes)
        return wrong

    def close(self) -> None:
        """Let go of the memory."""
        for opened in self._opened:
            opened.transfer.close()
            opened.l1.close()
            opened.l2.close()


class _Opened:
    """One pool in both tiers."""

    def __init__(
        self,
        bit: Parts,
        pool: SidePool,
        kv: Shard,
        options: EngineOptions,
        slots: tuple[int, int],
        device: torch.device,
    ) -> None:
        shard, tokens = Shard(pool.shape, kv.place, kv.tp_lcm_size), pool.tokens(options.page_size)
        layout = find_layout(options.mem_layout)
        if pool.shape.attention not in layout.attentions:  # page_head, and no heads: copied by kernel too
            layout = PAGE_FIRST
        self.bit = bit
        self.pool = pool
        self.l1 = DevicePool(shard.shape, tokens, slots[0], device)
        self.l2 = HostPool(
            shard.shape, tokens, slots[1], layout, device, options.hugepages, prefault=options.prefault
        )
        self.transfer = open_transfer(options.io_backend, self.l1, self.l2)
        self.oracle = Oracle(shard, tokens, device, salt=pool.name)
        self._shard = shard
        self._suffix = f".{pool.name}.{shard.namespace(tokens, layout.name).digest[:12]}"

    def part(self, storage: HiCacheStorage) -> Part:
        """What this pool has of a page in ``storage``."""
        return Part(self._shard.sliced(storage), self._suffix, self.l2.page, self._shard.is_writer)

    def only_in(self, tier: Tier, path: Iterable[Node]) -> list[Node]:
        """Nodes in both tiers that have this pool's part in ``tier`` alone."""
        other = Tier(1 - tier)
        return [
            node
            for node in path
            if node.slots[other] is not None and node.parts[tier] & ~node.parts[other] & self.bit
        ]

    def add(self, nodes: Iterable[Node], tier: Tier) -> None:
        """Record that the pages have this pool's part in ``tier``."""
        for node in nodes:
            node.parts[tier] |= self.bit


def _slots(nodes: Iterable[Node], tier: Tier) -> list[int]:
    return [node.slot(tier) for node in nodes]
