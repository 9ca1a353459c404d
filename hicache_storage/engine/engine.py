"""TierEngine: prefills token sequences through L1, L2 and L3 and proves every page of them.

The way of a page: computed into L1, copied to L2 (write-through), written to L3 by the backup
thread. When L1 has let go of it, it is loaded back from L2; when L2 has done so too, it is read
from L3 into L2 (prefetch) and loaded from there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from hicache_storage.engine.controller import CacheController
from hicache_storage.engine.layouts import find_layout
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.pools import DevicePool, HostPool, find_device, pool_slots
from hicache_storage.engine.prefetch import PrefetchOperation, PrefetchPolicy
from hicache_storage.engine.radix import Node, Tier
from hicache_storage.engine.report import EngineStats, PrefillReport, Source
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.tiers import Tiers
from hicache_storage.engine.transfer import check_io_backend, open_transfer
from hicache_storage.errors import ClosedError, SettingsError
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

WRITE_POLICIES = ("write_through",)

_CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Prefetch:
    """A request that waits while its pages are on their way to L2. For ``prefill`` or ``cancel``."""

    hashes: list[str]
    known: list[Node]
    """The prefix that was in L1 or L2, pinned in L2."""
    operation: PrefetchOperation | None


class TierEngine:
    """One rank's cache: L1 on ``device``, L2 in host memory, ``storage`` as L3 (None: without).

    Options have SGLang's names and meaning. ``l1_tokens`` sizes L1; L2 has ``hicache_ratio`` times
    as many pages, or ``hicache_size`` GB (10**9 bytes), which overrides it, and must be larger than
    L1. ``prefetch_policy`` says how long a request waits for L3: not at all (best_effort), until
    all is there (wait_complete), or timeout_base + timeout_per_ki_token * tokens / 1024 seconds
    (timeout); fewer than ``prefetch_threshold`` tokens are not fetched. When L2 is full of pages
    that L3 does not have yet, a request waits ``backup_wait`` seconds, then the oldest of these
    backups are dropped.

    Keys of ``storage`` are plain page hashes: open it with ``shape.namespace(...)``. It stays the
    caller's to close, after the engine. Any thread may call; calls run one after the other.

    Raises SettingsError for a bad option (naming the choices), MemoryError when a pool does not
    fit, and StorageError when the storage cannot register L2.
    """

    def __init__(
        self,
        shape: KVShape,
        page_size: int,
        *,
        l1_tokens: int,
        device: str = "cpu",
        hicache_ratio: float = 2.0,
        hicache_size: float | None = None,
        mem_layout: str = "layer_first",
        io_backend: str = "direct",
        write_policy: str = "write_through",
        prefetch_policy: str = "timeout",
        prefetch_threshold: int = 256,
        prefetch_timeout_base: float = 1.0,
        prefetch_timeout_per_ki_token: float = 0.25,
        backup_wait: float = 5.0,
        storage: HiCacheStorage | None = None,
    ) -> None:
        if page_size < 1:
            raise SettingsError(f"page_size is at least 1 token, not {page_size}")
        if write_policy not in WRITE_POLICIES:
            raise SettingsError(f"write_policy {write_policy!r} is none of: {', '.join(WRITE_POLICIES)}")
        self.device = device
        self.shape = shape
        self.page_size = page_size
        self.page_nbytes = shape.page_nbytes(page_size)
        self._policy = PrefetchPolicy(
            prefetch_policy, prefetch_threshold, prefetch_timeout_base, prefetch_timeout_per_ki_token
        )
        torch_device = find_device(device)
        layout = find_layout(mem_layout, shape.attention)
        check_io_backend(io_backend)
        l1_slots, l2_slots = pool_slots(page_size, self.page_nbytes, l1_tokens, hicache_ratio, hicache_size)
        l1 = DevicePool(shape, page_size, l1_slots, torch_device)
        l2 = HostPool(shape, page_size, l2_slots, layout, torch_device)
        self._oracle = Oracle(shape, page_size, torch_device)
        self._transfer = open_transfer(io_backend, l1, l2)
        self._storage = storage
        controller = None
        if storage is not None:
            try:
                storage.register_buffer(l2.buffer)
            except BaseException:
                l2.close()
                raise
            controller = CacheController(storage, -(-prefetch_threshold // page_size))
        self._tiers = Tiers(l1, l2, controller, backup_wait)
        self._tree = self._tiers.tree
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
            self._tree.unpin(prefetch.known, Tier.L2)
            if prefetch.operation is not None:
                self._tiers.l2.free(self._tiers.collect(prefetch.operation))

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
            if prefetch is None:
                prefetch = self._begin_prefetch(hashes)
            elif prefetch.hashes != hashes:
                raise ValueError("the prefetch was begun for other tokens")
            else:
                self._end_waiting(prefetch)
            path = self._tree.match(hashes)
            for tier in Tier:
                self._tree.pin(path, tier)
            self._tree.unpin(prefetch.known, Tier.L2)
            try:
                return self._prefill(len(tokens), hashes, path, prefetch)
            finally:
                for tier in Tier:
                    self._tree.unpin(path, tier)

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
            controller = self._tiers.controller
            if controller is not None and not controller.close(_CLOSE_SECONDS):
                logger.warning("a call of the storage does not return; L2 stays registered with it")
                return
            if self._storage is not None:
                try:
                    self._storage.unregister_buffer(self._tiers.l2.buffer)
                except Exception as error:
                    logger.warning("storage failed to unregister L2: %s: %s", type(error).__name__, error)
            self._tiers.l1.close()
            self._tiers.l2.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefill(self, tokens: int, hashes: list[str], path: list[Node], prefetch: Prefetch) -> PrefillReport:
        seconds = dict.fromkeys(Source, 0.0)
        pages = dict.fromkeys(Source, 0)
        pages[Source.L1] = sum(node.slots[Tier.L1] is not None for node in path)
        pages[Source.L2] = len(path) - pages[Source.L1]
        seconds[Source.L2] = self._load(path)
        if prefetch.operation is not None:
            self._policy.wait(prefetch.operation, self.page_size)
            pages[Source.L3] = self._add_prefetched(path, prefetch, prefetch.operation)
            seconds[Source.L3] = prefetch.operation.read_seconds + self._load(path)
        pages[Source.RECOMPUTED] = len(hashes) - len(path)
        seconds[Source.RECOMPUTED] = self._compute(path, hashes)
        wrong = self._oracle.wrong_bytes(self._tiers.l1.pages, [node.slot(Tier.L1) for node in path], hashes)
        self._copy_to_l2(path)
        self._tiers.back_up(path)
        sources = tuple(source for source in Source for _ in range(pages[source]))
        return PrefillReport(tokens, self.page_size, self.page_nbytes, sources, seconds, wrong)

    def _begin_prefetch(self, hashes: list[str]) -> Prefetch:
        known = self._tree.match(hashes)
        self._tree.pin(known, Tier.L2)
        missing = hashes[len(known) :]
        worth_it = missing and len(missing) * self.page_size >= self._policy.threshold
        # room for all that is missing: what L3 does not have either needs it after the prefill
        return Prefetch(hashes, known, self._tiers.fetch(missing) if worth_it else None)

    def _end_waiting(self, prefetch: Prefetch) -> None:
        if prefetch not in self._waiting:
            raise ValueError("the prefetch was used or cancelled before")
        self._waiting.remove(prefetch)

    def _add_prefetched(self, path: list[Node], prefetch: Prefetch, operation: PrefetchOperation) -> int:
        """Extend the path by the pages that have come, where they fit on to it; how many did."""
        slots = self._tiers.collect(operation)
        if slots:
            self._copy_to_l2(path)
        before = len(path)
        for index, slot in enumerate(slots, len(prefetch.known)):
            if index == len(path) and (not path or path[-1].slots[Tier.L2] is not None):
                self._tree.extend(path, prefetch.hashes[index], Tier.L2, slot)
                path[-1].in_l3 = True
            else:
                self._tiers.l2.free([slot])
        self._tiers.counts.prefetched += len(path) - before
        return len(path) - before

    def _load(self, path: list[Node]) -> float:
        """Copy to L1 what only L2 has; seconds."""
        nodes = [node for node in path if node.slots[Tier.L1] is None]
        slots = self._tiers.l1_slots(len(nodes))
        began = time.perf_counter()
        self._transfer.load([node.slot(Tier.L2) for node in nodes], slots)
        seconds = time.perf_counter() - began
        for node, slot in zip(nodes, slots, strict=True):
            self._tree.place(node, Tier.L1, slot)
        return seconds

    def _compute(self, path: list[Node], hashes: list[str]) -> float:
        """Fill the rest of the request's pages in L1 and extend the path by them; seconds."""
        missing = hashes[len(path) :]
        slots = self._tiers.l1_slots(len(missing))
        began = time.perf_counter()
        self._oracle.fill(self._tiers.l1.pages, slots, missing)
        seconds = time.perf_counter() - began
        for page_hash, slot in zip(missing, slots, strict=True):
            self._tree.extend(path, page_hash, Tier.L1, slot)
        return seconds

    def _copy_to_l2(self, path: list[Node]) -> None:
        """Write through: copy to L2 what only L1 has, from the root on as far as there is room."""
        nodes = [node for node in path if node.slots[Tier.L2] is None]
        slots = self._tiers.l2_slots(len(nodes))
        self._tiers.counts.dropped += len(nodes) - len(slots)
        nodes = nodes[: len(slots)]
        self._transfer.store([node.slot(Tier.L1) for node in nodes], slots)
        for node, slot in zip(nodes, slots, strict=True):
            self._tree.place(node, Tier.L2, slot)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")
