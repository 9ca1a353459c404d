"""TierEngine: prefills token sequences through L1, L2 and L3 and proves every page of them.

The way of a page: computed into L1, copied to L2 as the write policy says, written to L3 by the backup
thread. When L1 has let go of it, it is loaded back from L2; when L2 has done so too, it is read
from L3 into L2 (prefetch) and loaded from there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hicache_storage.engine.attachment import Attachment, attach, check_identity
from hicache_storage.engine.compute import Compute
from hicache_storage.engine.memory import l1_and_l2_slots, open_memory
from hicache_storage.engine.options import EngineOptions, resolve
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.pools import find_device
from hicache_storage.engine.prefill import Prefetch, Prefill, begin_prefetch, give_up
from hicache_storage.engine.radix import Tier
from hicache_storage.engine.ranks import Asking, OneRank, Ranks
from hicache_storage.engine.report import EngineStats, PrefillReport
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.side_pools import SidePool, SidePools
from hicache_storage.engine.tiers import Tiers
from hicache_storage.errors import BusyError, ClosedError, RequestError, StorageError
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


class TierEngine:
    """One rank's cache: L1 on a device, L2 in host memory, ``storage`` as L3 (None: without).

    ``options`` are those of EngineOptions, by SGLang's names; ``options`` and ``notes`` of the
    engine are what its rules made of them. ``compute`` stands behind L1 (None: the oracle).

    ``shape`` is the whole model's; ``shard`` is what this one of ``ranks`` (None: it is alone) holds of
    it, cut into ``tp_lcm_size`` slices of heads where that is given. Every rank has an engine, and all
    make the same calls in the same order. ``side_pools`` are what a hybrid model keeps beside KV.

    Keys of ``storage`` begin with page hashes: open it with ``shape.namespace(...)``, or that of the
    shard, for the layout in force. It stays the caller's to close, after the engine, and so do the
    ranks. Any thread may call; calls run one after the other.

    Raises SettingsError for a bad option (naming the choices) and for a storage of another layout,
    MemoryError when a pool does not fit, StorageError when the storage cannot register L2, and
    RanksError, here as in every call that other ranks take part in, when they do not.
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
        shard.check_layout(self.options.mem_layout)
        if storage is not None:
            self._check_identity(storage)
        slots = l1_and_l2_slots(shape, self.options)
        # what one rank is refused above all are; what differs from here on is an error on all
        ranks.agree(Asking.REQUEST, f"opening {shard.model}, {tp_lcm_size}, {side_pools}, {self.options}", [])
        self._compute = compute or Oracle(shard, page_size, device)
        with ExitStack() as undo:
            memory = open_memory(shape, self.options)
            undo.callback(memory.close)
            sides = SidePools(side_pools, shard, self.options, slots, device)
            undo.callback(sides.close)
            self._tiers = Tiers(memory, self.options.write_policy, self.options.backup_wait, sides, ranks)
            self._attachment = None if storage is None else self._attach(storage)
            undo.pop_all()
        self._memory = memory
        self._waiting: set[Prefetch] = set()
        self._running: set[int] = set()
        self._past_errors = 0
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
            l1, l2, controller = self._tiers.l1, self._tiers.l2, self._tiers.traffic.controller
            errors = self._past_errors + (controller.storage_errors if controller else 0)
            return EngineStats(
                l1_resident=l1.slots - l1.free_slots,
                l2_resident=l2.slots - l2.free_slots,
                storage_errors=errors,
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
        self._running.add(threading.get_ident())
        try:
            with self._lock:
                self._check_open()
                return self._prefill(tokens, prefetch)
        finally:
            self._running.discard(threading.get_ident())

    def flush_l1(self) -> int:
        """Evict every page from L1; how many left."""
        with self._lock:
            self._check_open()
            return self._tiers.flush(Tier.L1)

    def flush_l2(self) -> int:
        """Evict every page from L2, except those that wait for their backup; how many left."""
        with self._lock:
            self._check_open()
            return self._tiers.flush(Tier.L2)

    def wait_for_backup(self, timeout: float | None = None) -> bool:
        """Wait until nothing is on its way to or from L3; False when ``timeout`` seconds passed."""
        with self._lock:
            self._check_open()
            return self._tiers.traffic.settle(timeout)

    def attach(self, storage: HiCacheStorage) -> None:
        """Take ``storage`` as L3, on all ranks or on none. Pages that L1 and L2 have go there when they
        are used again.

        Raises BusyError, naming what, while requests run or wait; RequestError when there is an L3
        already; SettingsError for a storage of another identity; and what the storage raises when it
        cannot register L2. Then nothing has changed.
        """
        with self._idle("attach"):
            if self._attachment is not None:
                raise RequestError("a storage is attached already: detach it first")
            self._check_identity(storage)
            self._attachment = self._attach(storage)

    def detach(self) -> None:
        """Go on without L3: nothing of it is used, or known, any more. The storage stays open.

        Raises BusyError, naming what, while requests run or wait and while pages of any rank are on
        their way to or from L3. Without a storage it does nothing.
        """
        with self._idle("detach"):
            if self._attachment is None:
                return
            is_settled = self._tiers.traffic.settle(0.0)
            if not all(self._tiers.ranks.agree(Asking.REQUEST, "detach", [is_settled])):
                raise BusyError("detach: pages are on their way to or from L3; wait_for_backup first")
            self._past_errors += self._attachment.controller.storage_errors
            self._attachment.end(_CLOSE_SECONDS)
            self._attachment = None
            self._tiers.traffic.forget()

    def close(self) -> None:
        """End the threads after the calls in progress and let go of the pools; safe to call twice.

        Backups that have not begun are dropped: ``wait_for_backup`` first to keep them.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._memory.transfer.close()
            if self._attachment is not None and not self._attachment.end(_CLOSE_SECONDS):
                return
            self._attachment = None
            self._memory.close()
            self._tiers.sides.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_identity(self, storage: HiCacheStorage) -> None:
        layout = self.options.mem_layout
        check_identity(storage, self.shard.namespace(self.page_size, layout), layout)

    def _attach(self, storage: HiCacheStorage) -> Attachment:
        min_pages = -(-self.options.prefetch_threshold // self.page_size)
        tiers = self._tiers
        with ExitStack() as undo:
            try:
                attachment = attach(storage, self.shard, tiers.l2, tiers.sides, min_pages, tiers.ranks)
            except BaseException:
                tiers.ranks.agree(Asking.REQUEST, "attach", [False])
                raise
            undo.callback(attachment.end, _CLOSE_SECONDS)
            if not all(tiers.ranks.agree(Asking.REQUEST, "attach", [True])):
                raise StorageError("another rank could not attach its storage")
            undo.pop_all()
        tiers.traffic.controller = attachment.controller
        return attachment

    @contextmanager
    def _idle(self, what: str) -> Iterator[None]:
        """The engine to oneself, as SGLang's scheduler has to be idle for the same."""
        if running := len(self._running):
            raise BusyError(f"{what}: requests that run: {running}; let them end first")
        with self._lock:
            self._check_open()
            if waiting := len(self._waiting):
                raise BusyError(f"{what}: requests that wait: {waiting}; prefill or cancel them first")
            yield

    def _prefill(self, tokens: Sequence[int], prefetch: Prefetch | None) -> PrefillReport:
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

    def _begin_prefetch(self, hashes: list[str]) -> Prefetch:
        return begin_prefetch(self._tiers, self.options.patience, self.page_size, hashes)

    def _end_waiting(self, prefetch: Prefetch) -> None:
        if prefetch not in self._waiting:
            raise ValueError("the prefetch was used or cancelled before")
        self._waiting.remove(prefetch)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
