"""TierEngine: prefills token sequences through L1, L2 and L3 and proves every page of them.

The way of a page: computed into L1, copied to L2 (write-through), written to L3 by the backup
thread. When L1 has let go of it, it is loaded back from L2; when L2 has done so too, it is read
from L3 into L2 (prefetch) and loaded from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hicache_storage.buffers import Buffer
from hicache_storage.engine.compute import Compute
from hicache_storage.engine.controller import CacheController
from hicache_storage.engine.layouts import find_layout
from hicache_storage.engine.memory_limits import memlock_shortage
from hicache_storage.engine.options import EngineOptions, resolve
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.page_objects import PageObjects, Part
from hicache_storage.engine.pools import DevicePool, HostPool, find_device, pool_slots
from hicache_storage.engine.prefill import Prefetch, Prefill, begin_prefetch, give_up
from hicache_storage.engine.radix import Tier
from hicache_storage.engine.ranks import Asking, OneRank, Ranks
from hicache_storage.engine.report import EngineStats, PrefillReport
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.side_pools import SidePool, SidePools
from hicache_storage.engine.tiers import Tiers
from hicache_storage.engine.transfer import open_transfer
from hicache_storage.errors import ClosedError, SettingsError
from hicache_storage.namespace import Namespace
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


class TierEngine:
    """One rank's cache: L1 on a device, L2 in host memory, ``storage`` as L3 (None: without).

    ``options`` are those of EngineOptions, by SGLang's names; ``options`` and ``notes`` of the
    engine are what its rules made of them. ``compute`` stands behind L1 (None: the oracle).

    Keys of ``storage`` are plain page hashes: open it with ``shape.namespace(...)`` for the layout in
    force. It stays the caller's to close, after the engine. Any thread may call; calls run one
    after the other.

    Raises SettingsError for a bad option (naming the choices) and for a storage of another layout,
    MemoryError when a pool does not fit, and StorageError when the storage cannot register L2.
    """

    def __init__(
        self,
        shape: KVShape,
        page_size: int,
        *,
        storage: HiCacheStorage | None = None,
        compute: Compute | None = None,
        ranks: Ranks | None = None,
        tp_lcm_size: int | None = None,
        side_pools: Sequence[SidePool] = (),
        **options: Any,
    ) -> None:
        self.options, self.notes = resolve(EngineOptions(page_size, **options))
        for note in self.notes:
            logger.warning("%s", note)
        ranks = ranks or OneRank()
        self.shard = shard = Shard(shape, ranks.place, tp_lcm_size)
        self.shape = shape = shard.shape
        self.page_size = page_size
        self.page_nbytes = shape.page_nbytes(page_size)
        device = find_device(self.options.device)
        layout = find_layout(self.options.mem_layout, shape.attention)
        shard.check_layout(layout.name)
        _check_identity(storage, shard.namespace(page_size, layout.name), layout.name)
        l1_slots, l2_slots = pool_slots(
            page_size,
            self.page_nbytes,
            self.options.l1_tokens,
            self.options.hicache_ratio,
            self.options.hicache_size,
        )
        # what one rank is refused above all are; what differs from here on is an error on all
        ranks.agree(Asking.REQUEST, f"opening {shard.model}, {tp_lcm_size}, {side_pools}, {self.options}", [])
        l1 = DevicePool(shape, page_size, l1_slots, device)
        hugepages, prefault = self.options.hugepages, self.options.prefault
        l2 = HostPool(shape, page_size, l2_slots, layout, device, hugepages, prefault=prefault)
        self._compute = compute or Oracle(shard, page_size, device)
        self._storage = storage
        controller = None
        sides = None
        try:
            transfer = open_transfer(self.options.io_backend, l1, l2)
            sides = SidePools(side_pools, shard, self.options, (l1_slots, l2_slots), device)
            if storage is not None:
                _register(storage, [l2.buffer, *sides.buffers])
                kv = Part(shard.suffixes, lambda slot: shard.cut(l2.page(slot)), shard.is_writer)
                objects = PageObjects(storage, [kv, *sides.parts])
                min_pages = -(-self.options.prefetch_threshold // page_size)
                controller = CacheController(objects, min_pages, sides.restorable, ranks)
        except BaseException:
            l2.close()
            if sides is not None:
                sides.close()
            raise
        self._tiers = Tiers(
            l1,
            l2,
            transfer,
            controller,
            self.options.write_policy,
            self.options.backup_wait,
            sides,
            ranks,
        )
        self._waiting: set[Prefetch] = set()
        self._lock = threading.RLock()
        self._closed = False

    @property
    def memory_kind(self) -> str:
        """Which memory L2 has: pinned for CUDA, or plain."""
        return self._tiers.l2.memory_kind

    @property
    def l1_nbytes(self) -> int:
        """Bytes of L1."""
        return self._tiers.l1.nbytes

    @property
    def l2_nbytes(self) -> int:
        """Bytes of L2."""
        return self._tiers.l2.nbytes

    @property
    def stats(self) -> EngineStats:
        """Counts so far, and what is resident now."""
        with self._lock:
            l1, l2, controller = self._tiers.l1, self._tiers.l2, self._tiers.controller
            return EngineStats(
                l1_resident=l1.slots - l1.free_slots,
                l2_resident=l2.slots - l2.free_slots,
                storage_errors=controller.storage_errors if controller else 0,
                **asdict(self._tiers.counts),
            )

    def prefetch(self, tokens: Sequence[int]) -> Prefetch:
        """Begin to fetch a waiting request's pages from L3; ``prefill`` takes what has come by then."""
        with self._lock:
            self._check_open()
            prefetch = self._begin_prefetch(page_hashes(tokens, self.page_size))
            self._waiting.add(prefetch)
            return prefetch

    def cancel(self, prefetch: Prefetch) -> None:
        """Give up a waiting request; pages that have come are not kept. Raises ValueError as ``prefill``."""
        with self._lock:
            self._end_waiting(prefetch)
            give_up(self._tiers, prefetch)

    def prefill(self, tokens: Sequence[int], prefetch: Prefetch | None = None) -> PrefillReport:
        """Bring all full pages of ``tokens`` into L1, from the nearest tier that has them.

        ``prefetch`` is what ``prefetch(tokens)`` returned, if the request has waited. Raises
        ValueError when the request has more pages than L1, when a token is no unsigned 32-bit
        number, and when the prefetch is another request's or was used before.
        """
        with self._lock:
            self._check_open()
            hashes = page_hashes(tokens, self.page_size)
            if len(hashes) > self._tiers.l1.slots:
                raise ValueError(
                    f"a request of {len(tokens)} tokens ({len(hashes)} pages) does not fit in L1 of "
                    f"{self._tiers.l1.slots} pages; raise l1_tokens"
                )
            if prefetch is not None:
                if prefetch.hashes != hashes:
                    raise ValueError("the prefetch was begun for other tokens")
                self._end_waiting(prefetch)
                if prefetch.operation is None:  # there may be reason, or room, by now
                    give_up(self._tiers, prefetch)
                    prefetch = None
            if prefetch is None:
                prefetch = self._begin_prefetch(hashes)
            request = Prefill(self._tiers, self._compute, self.options.patience, self.page_size)
            return request.run(tokens, prefetch)

    def flush_l1(self) -> int:
        """Evict every page from L1; how many left."""
        with self._lock:
            return self._tiers.flush(Tier.L1)

    def flush_l2(self) -> int:
        """Evict every page from L2, except those that wait for their backup; how many left."""
        with self._lock:
            return self._tiers.flush(Tier.L2)

    def wait_for_backup(self, timeout: float | None = None) -> bool:
        """Wait until nothing is on its way to or from L3; False when ``timeout`` seconds passed."""
        with self._lock:
            return self._tiers.settle(timeout)

    def close(self) -> None:
        """End the threads after the calls in progress and let go of the pools; safe to call twice.

        Backups that have not begun are dropped: ``wait_for_backup`` first to keep them.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._tiers.transfer.close()
            controller = self._tiers.controller
            if controller is not None and not controller.close(_CLOSE_SECONDS):
                logger.warning("a call of the storage does not return; L2 stays registered with it")
                return
            if self._storage is not None:
                _unregister(self._storage, [self._tiers.l2.buffer, *self._tiers.sides.buffers])
            self._tiers.l1.close()
            self._tiers.l2.close()
            self._tiers.sides.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin_prefetch(self, hashes: list[str]) -> Prefetch:
        return begin_prefetch(self._tiers, self.options.patience, self.page_size, hashes)

    def _end_waiting(self, prefetch: Prefetch) -> None:
        if prefetch not in self._waiting:
            raise ValueError("the prefetch was used or cancelled before")
        self._waiting.remove(prefetch)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")


def _check_identity(storage: HiCacheStorage | None, expected: Namespace, mem_layout: str) -> None:
    """Other bytes than the namespace says would be served to whoever believes it."""
    said = Namespace() if storage is None else storage.namespace
    if not said.object_layout:
        return
    for field in ("attention", "dtype", "object_layout", "page_size", "layers", "heads", "head_dim", "ranks"):
        there, here = getattr(said, field), getattr(expected, field)
        if there != here:
            raise SettingsError(
                f"the storage was opened for pages with {field} {there}, and mem_layout {mem_layout} of this "
                f"shape stores {here}; open it with shape.namespace(page_size, {mem_layout!r}), or that of "
                "the shard where there are ranks"
            )


def _register(storage: HiCacheStorage, buffers: Sequence[Buffer]) -> None:
    for number, buffer in enumerate(buffers):
        try:
            storage.register_buffer(buffer)
        except BaseException:
            _unregister(storage, buffers[:number])
            if advice := memlock_shortage(sum(buffer.nbytes for buffer in buffers)):
                logger.warning("the storage did not register L2, perhaps for this: %s", advice)
            raise


def _unregister(storage: HiCacheStorage, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        try:
            storage.unregister_buffer(buffer)
        except Exception as error:
            logger.warning("storage failed to unregister L2: %s: %s", type(error).__name__, error)
