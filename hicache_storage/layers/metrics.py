"""Counts what the caller sees: pages by status, bytes, seconds.

Two readers: Prometheus, through ``prometheus_client``'s own registry, and anybody who asks
``MetricsLayer.take()`` for the transfers since he last asked (SGLang's StorageMetrics is made of
that). Metrics are shared by all storages of a process and told apart by the ``backend`` label, so
attaching and detaching at run time leaves nothing behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from hicache_storage.buffers import Page, page_nbytes
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import HiCacheStorage, Status

if TYPE_CHECKING:
    from prometheus_client import Counter, Histogram

SECONDS_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
KEPT_TRANSFERS = 4096
"""Most transfers kept for ``take``; when nobody asks, the oldest are dropped."""

_REGISTERING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Transfer:
    """One batch that moved pages: ``op`` is "get" or "set"."""

    op: str
    pages: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Instruments:
    """The Prometheus metrics of this package."""

    pages: Counter
    nbytes: Counter
    seconds: Histogram


def instruments() -> Instruments:
    """Registered on first use: SGLang sets its multiprocess directory before that. Any thread."""
    with _REGISTERING:  # the first call of two threads at once would register twice
        return _registered()


@cache
def _registered() -> Instruments:
    from prometheus_client import Counter, Histogram

    return Instruments(
        Counter("hicache_storage_pages", "Pages by operation and outcome", ["backend", "op", "status"]),
        Counter("hicache_storage_bytes", "Bytes moved for pages that were OK", ["backend", "op"]),
        Histogram(
            "hicache_storage_call_seconds",
            "Seconds a batch call took",
            ["backend", "op"],
            buckets=SECONDS_BUCKETS,
        ),
    )


class MetricsLayer(Layer):
    """Observes batch calls under the label ``backend``."""

    def __init__(self, inner: HiCacheStorage, backend: str) -> None:
        super().__init__(inner)
        self._backend = backend
        self._transfers: list[Transfer] = []
        self._lock = threading.Lock()

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        start = time.perf_counter()
        found = self.inner.batch_exists(keys)
        self._observe("exists", time.perf_counter() - start, ("present" if f else "absent" for f in found))
        return found

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        start = time.perf_counter()
        statuses = self.inner.batch_get_into(keys, pages)
        self._moved("get", time.perf_counter() - start, statuses, pages)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        start = time.perf_counter()
        statuses = self.inner.batch_set_from(keys, pages)
        self._moved("set", time.perf_counter() - start, statuses, pages)
        return statuses

    def take(self) -> list[Transfer]:
        """The transfers since the last call, oldest first."""
        with self._lock:
            taken, self._transfers = self._transfers, []
        return taken

    def _moved(self, op: str, seconds: float, statuses: Sequence[Status], pages: Sequence[Page]) -> None:
        moved = [page_nbytes(page) for page, status in zip(pages, statuses, strict=True) if status]
        instruments().nbytes.labels(self._backend, op).inc(sum(moved))
        self._observe(op, seconds, (status.value for status in statuses))
        if moved:
            with self._lock:
                self._transfers.append(Transfer(op, len(moved), sum(moved), seconds))
                del self._transfers[:-KEPT_TRANSFERS]

    def _observe(self, op: str, seconds: float, outcomes: Iterable[str]) -> None:
        counts: dict[str, int] = {}
        for outcome in outcomes:
            counts[outcome] = counts.get(outcome, 0) + 1
        for outcome, count in counts.items():
            instruments().pages.labels(self._backend, op, outcome).inc(count)
        instruments().seconds.labels(self._backend, op).observe(seconds)
