"""A prefetch: pages of one request on their way from L3 to L2, and how long to wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_storage.engine.page_objects import Parts
from hicache_storage.errors import SettingsError


class PrefetchOperation:
    """Pages of ``request`` wanted in L2 slots, read batch by batch by the prefetch thread.

    Of the request's pages, ``known`` tells the parts of those that a tier has, the next ones are wanted
    where there are ``slots``. The query thread narrows them to those that are worth reading.

    The engine may ``stop`` it at any time. From then on the slots of complete pages are the
    engine's, and so is every other slot, except those of a batch that is being read: a storage may
    still write into these until its call has returned, and the prefetch thread lets go of them then.
    """

    def __init__(self, request: Sequence[str], known: Sequence[Parts], slots: list[int]) -> None:
        self.request = request
        self.known = known
        self.hashes = request[len(known) : len(known) + len(slots)]
        self.slots = slots
        self.wanted: Sequence[Parts] = []
        self.started = time.monotonic()
        self.done = threading.Event()
        self.read_seconds = 0.0
        self._lock = threading.Lock()
        self._completed: list[Parts] = []
        self._reading: slice | None = None
        self._stopped = False

    @property
    def is_stopped(self) -> bool:
        """Whether nobody waits for it any more."""
        return self._stopped

    def narrow(self, wanted: Sequence[Parts]) -> None:
        """Read no more than these parts of the leading pages."""
        self.hashes = self.hashes[: len(wanted)]
        self.wanted = wanted

    def begin(self, batch: slice) -> bool:
        """Whether the batch may be read; until ``end`` its slots are in flight."""
        with self._lock:
            if self._stopped:
                return False
            self._reading = batch
            return True

    def end(self, batch: slice, got: Sequence[Parts]) -> list[int]:
        """The call returned with ``got`` of the leading good pages.

        Returns the batch's slots when the operation was stopped meanwhile: they are free now.
        """
        with self._lock:
            self._reading = None
            if self._stopped:
                return self.slots[batch]
            self._completed += got
            return []

    def stop(self) -> tuple[list[Parts], list[int], bool]:
        """End the operation: (parts of the complete pages, free slots, whether some are in flight)."""
        with self._lock:
            self._stopped = True
            done = len(self._completed)
            free = self.slots[done:]
            if self._reading is not None:
                free = self.slots[done : self._reading.start] + self.slots[self._reading.stop :]
            return self._completed, free, self._reading is not None


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How long a request that is about to run waits for its prefetch, and when it is worth one."""

    name: str = "timeout"
    threshold: int = 256
    """Fewer tokens than this are recomputed rather than fetched."""
    timeout_base: float = 1.0
    """Seconds."""
    timeout_per_ki_token: float = 0.25
    """Seconds for each 1024 tokens."""

    def __post_init__(self) -> None:
        if self.name not in _PATIENCE:
            raise SettingsError(f"prefetch_policy {self.name!r} is none of: {', '.join(_PATIENCE)}")
        if min(self.threshold, self.timeout_base, self.timeout_per_ki_token) < 0:
            raise SettingsError("prefetch_threshold and prefetch timeouts are not negative")

    def wait(self, operation: PrefetchOperation, page_size: int) -> None:
        """Return when the request should go on, with whatever is complete by then."""
        patience = _PATIENCE[self.name](self, len(operation.hashes) * page_size)
        if patience is not None:
            patience = max(0.0, operation.started + patience - time.monotonic())
        operation.done.wait(patience)


def _timeout(policy: PrefetchPolicy, tokens: int) -> float:
    return policy.timeout_base + policy.timeout_per_ki_token * tokens / 1024


_PATIENCE: dict[str, Callable[[PrefetchPolicy, int], float | None]] = {
    "best_effort": lambda _policy, _tokens: 0.0,
    "wait_complete": lambda _policy, _tokens: None,
    "timeout": _timeout,
}
