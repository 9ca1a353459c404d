"""The decode side of PD disaggregation: generated pages go to L3, page by page, for the next turn.

A prefill engine computes a prompt and stores its full pages; the decode engine gets their KV, and
computes one token after the other. Whenever these fill a page it is copied to L2 and written to L3,
under the hash that the prefill engine will ask for when the user's next turn begins with them. L2 is
a passage here: its slot is free again when the backup has ended. SGLang does it with
``--disaggregation-decode-enable-offload-kvcache`` (``disaggregation/decode_kvcache_offload_manager.py``).

The KV of the last token is computed when it is fed in again, so a page is complete one token after
its last one was generated.
"""

from __future__ import annotations

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from queue import Empty
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hicache_storage.engine.attachment import attach, check_identity
from hicache_storage.engine.compute import Compute, Work
from hicache_storage.engine.controller import BackedUp, BackupOperation
from hicache_storage.engine.memory import open_memory
from hicache_storage.engine.options import EngineOptions, resolve
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.page_objects import KV
from hicache_storage.engine.pools import find_device
from hicache_storage.engine.radix import Node
from hicache_storage.engine.ranks import OneRank
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.side_pools import SidePools
from hicache_storage.errors import CapacityError, ClosedError, SettingsError
from hicache_storage.storage import HiCacheStorage

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 10.0


@dataclass(slots=True, eq=False)
class Decoding:
    """A request that generates. ``tokens`` are the prompt's and those generated so far."""

    tokens: array[int]
    hashes: list[str]
    """Of the pages whose KV is complete."""
    slots: list[int]
    """In L1, of these pages and of the one that fills."""
    offloaded: int
    """So many leading pages are the prefill engine's, or on their way to L3."""


@dataclass(frozen=True, slots=True)
class DecodeStats:
    """Pages since the engine was opened."""

    offloaded: int
    """Sent on their way to L3."""
    backed_up: int
    backup_failed: int
    lost: int
    """Complete when their request finished, and without room in L2 until then."""
    l1_resident: int
    l2_resident: int


class DecodeEngine:
    """One rank that decodes, with ``storage`` as L3; options are those of EngineOptions.

    ``offload_stride`` is how many tokens are offloaded together (whole pages; SGLang's
    SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE), one page unless set. Open ``storage`` as for a TierEngine: with
    the same namespace each finds the other's pages. Any thread may call; calls run one after the other.

    Raises as TierEngine does.
    """

    def __init__(
        self,
        shape: KVShape,
        page_size: int,
        *,
        storage: HiCacheStorage,
        compute: Compute | None = None,
        offload_stride: int | None = None,
        **options: Any,
    ) -> None:
        in_force, self.notes = resolve(EngineOptions(page_size, **options))
        for note in self.notes:
            logger.warning("%s", note)
        if offload_stride is not None and offload_stride < 1:
            raise SettingsError(f"offload_stride is at least 1 token, not {offload_stride}")
        ranks = OneRank()
        shard = Shard(shape, ranks.place, None)
        check_identity(storage, shard.namespace(page_size, in_force.mem_layout), in_force.mem_layout)
        device = find_device(in_force.device)
        self.options = in_force
        self.page_size = page_size
        self._stride = max(1, (offload_stride or 0) // page_size)
        self._compute = compute or Oracle(shard, page_size, device)
        with ExitStack() as undo:
            self._memory = open_memory(shape, in_force)
            undo.callback(self._memory.close)
            self._l1, self._l2 = self._memory.l1, self._memory.l2
            sides = SidePools([], shard, in_force, (self._l1.slots, self._l2.slots), device)
            self._attachment = attach(storage, shard, self._l2, sides, 1, ranks)
            undo.pop_all()
        self._decoding: set[Decoding] = set()
        self._in_flight = 0
        self._offloaded = self._backed_up = self._failed = self._lost = 0
        self._lock = threading.RLock()
        self._closed = False

    @property
    def stats(self) -> DecodeStats:
        """Counts so far, and what is resident now."""
        with self._lock:
            self._handle_events()
            return DecodeStats(
                offloaded=self._offloaded,
                backed_up=self._backed_up,
                backup_failed=self._failed,
                lost=self._lost,
                l1_resident=self._l1.slots - self._l1.free_slots,
                l2_resident=self._l2.slots - self._l2.free_slots,
            )

    def begin(self, prompt: Sequence[int]) -> Decoding:
        """Take over a prompt from the prefill engine, which has stored its full pages.

        ``compute`` stands for the KV transfer between the two: it fills these pages. Raises
        CapacityError when L1 has no room for the prompt, ValueError for an empty one.
        """
        with self._lock:
            self._check_open()
            if not prompt:
                raise ValueError("there is nothing to decode after an empty prompt")
            request = Decoding(_tokens(prompt), [], [], 0)
            self._take_l1(request, len(prompt))
            try:
                self._complete(request, len(prompt))
            except BaseException:
                self._l1.free(request.slots)
                raise
            request.offloaded = len(request.hashes)
            self._decoding.add(request)
            return request

    def generate(self, request: Decoding, token: int) -> int:
        """Add the next token; how many pages that sent on their way to L3.

        Raises CapacityError, and adds nothing, when L1 has no room for one more page: finish a
        request first (SGLang retracts one). Raises ValueError for a request that has finished.
        """
        with self._lock:
            self._check_open()
            self._check_decoding(request)
            added = _tokens([token])
            self._take_l1(request, len(request.tokens) + 1)
            self._complete(request, len(request.tokens))  # the last one is fed in for the next
            request.tokens += added
            return self._offload(request, self._stride)

    def finish(self, request: Decoding) -> int:
        """End a request: offload what is complete, and let go of L1; how many pages were sent.

        The last page, if it is not full, is the next prefill's to compute.
        """
        with self._lock:
            self._check_open()
            self._check_decoding(request)
            self._decoding.remove(request)
            offloaded = self._offload(request, 1)
            self._lost += len(request.hashes) - request.offloaded
            self._l1.free(request.slots)
            return offloaded

    def wait_for_backup(self, timeout: float | None = None) -> bool:
        """Wait until nothing is on its way to L3; False when ``timeout`` seconds passed."""
        ends_at = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            self._check_open()
            while self._in_flight:
                if not self._handle_event(None if ends_at is None else ends_at - time.monotonic()):
                    return False
            return True

    def close(self) -> None:
        """End the threads after the calls in progress and let go of the pools; safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._memory.transfer.close()
            if self._attachment.end(_CLOSE_SECONDS):
                self._memory.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take_l1(self, request: Decoding, tokens: int) -> None:
        missing = -(-tokens // self.page_size) - len(request.slots)
        if missing > self._l1.free_slots:
            raise CapacityError(f"L1 has no room for {missing} more pages: finish a request first")
        slots = [self._l1.alloc() for _ in range(missing)]
        request.slots += [slot for slot in slots if slot is not None]

    def _complete(self, request: Decoding, tokens: int) -> None:
        """The KV of so many leading tokens is there: compute the pages that they fill."""
        begin, end = len(request.hashes), tokens // self.page_size
        if begin == end:
            return
        parent = request.hashes[-1] if request.hashes else None
        filled = request.tokens[begin * self.page_size : end * self.page_size]
        hashes = request.hashes + page_hashes(filled, self.page_size, parent)
        self._compute.compute(
            self._l1.pages, Work(request.tokens[:tokens], hashes, request.slots[:end], begin)
        )
        request.hashes = hashes

    def _offload(self, request: Decoding, at_least: int) -> int:
        """Send complete pages to L3, as far as there is room in L2 for them; the others next time."""
        self._handle_events()
        begin = request.offloaded
        count = min(len(request.hashes) - begin, self._l2.free_slots)
        count -= count % at_least
        if count == 0:
            return 0
        slots = sorted(slot for slot in (self._l2.alloc() for _ in range(count)) if slot is not None)
        self._memory.transfer.store(request.slots[begin : begin + count], slots)
        nodes = [Node(page_hash, None) for page_hash in request.hashes[begin : begin + count]]
        self._attachment.controller.backup(BackupOperation(nodes, [], [KV] * count, slots))
        self._in_flight += 1
        request.offloaded += count
        self._offloaded += count
        return count

    def _handle_events(self) -> None:
        while self._in_flight and self._handle_event(0.0):
            pass

    def _handle_event(self, timeout: float | None) -> bool:
        """Let go of L2 where a backup has ended; False when none has in time."""
        try:
            event = self._attachment.controller.events.get(
                timeout=None if timeout is None else max(0.0, timeout)
            )
        except Empty:
            return False
        assert isinstance(event, BackedUp)
        self._l2.free(event.operation.slots)
        self._backed_up += sum(parts == KV for parts in event.stored)
        self._failed += sum(parts != KV for parts in event.stored)
        self._in_flight -= 1
        return True

    def _check_decoding(self, request: Decoding) -> None:
        if request not in self._decoding:
            raise ValueError("the request has finished, or is another engine's")

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the engine is closed")


def _tokens(tokens: Sequence[int]) -> array[int]:
    try:
        return array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"token ids are integers from 0 to 2**32 - 1: {error}") from error
