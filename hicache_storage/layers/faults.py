"""Injects faults, so that an operator can see how his deployment takes them before they happen.

Sits right above the backend: everything above it, integrity included, has to cope. Off unless the
``faults`` setting is given.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from hicache_storage.buffers import Page
from hicache_storage.deadline import time_left
from hicache_storage.errors import DeadlineError, UnavailableError
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status

logger = logging.getLogger(__name__)


class FaultPlan(BaseModel):
    """Which faults, how often. Rates are probabilities between 0 and 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, description="Makes the faults the same in every run")
    error_rate: float = Field(default=0.0, ge=0, le=1, description="Calls that fail as a whole")
    page_error_rate: float = Field(default=0.0, ge=0, le=1, description="Pages of a batch that fail alone")
    flip_rate: float = Field(default=0.0, ge=0, le=1, description="Pages read back with one bit flipped")
    hang_rate: float = Field(default=0.0, ge=0, le=1, description="Calls that use up their deadline")
    delay: float = Field(default=0.0, ge=0, description="Seconds added to every call")
    fail_after: int | None = Field(
        default=None, ge=0, description="From this many calls on, every call fails"
    )


class FaultsLayer(Layer):
    """The backend below, made worse by ``plan``; safe from several threads."""

    HANG_SECONDS = 3600.0

    def __init__(self, inner: HiCacheStorage, plan: FaultPlan) -> None:
        super().__init__(inner)
        self._plan = plan
        self._random = random.Random(plan.seed)
        self._lock = threading.Lock()
        self._calls = 0
        self._released = threading.Event()
        logger.warning("faults are injected: %s", plan.model_dump(exclude_defaults=True))

    def get(self, key: str) -> ReadableBuffer | None:
        self._before()
        value = self.inner.get(key)
        if value and self._chance(self._plan.flip_rate):
            value = bytearray(value)
            self._flip(memoryview(value))
        return value

    def exists(self, key: str) -> bool:
        self._before()
        return self.inner.exists(key)

    def set(self, key: str, value: memoryview) -> None:
        self._before()
        self.inner.set(key, value)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        self._before()
        return self.inner.batch_exists(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        self._before()
        statuses = self.inner.batch_get_into(keys, pages)
        for page, status in zip(pages, statuses, strict=True):
            if status and self._chance(self._plan.flip_rate):
                self._flip(max(page, key=lambda buffer: buffer.nbytes).view)
        return self._fail_some(statuses)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        self._before()
        return self._fail_some(self.inner.batch_set_from(keys, pages))

    def close(self) -> None:
        self._released.set()
        self.inner.close()

    def _before(self) -> None:
        with self._lock:
            self._calls += 1
            calls = self._calls
        if self._plan.delay:
            self._wait(self._plan.delay)
        if self._chance(self._plan.hang_rate):
            self._wait(self.HANG_SECONDS)
        if self._plan.fail_after is not None and calls > self._plan.fail_after:
            raise UnavailableError(f"an injected failure: call {calls} of at most {self._plan.fail_after}")
        if self._chance(self._plan.error_rate):
            raise UnavailableError("an injected failure")

    def _wait(self, seconds: float) -> None:
        """Wait, but like a bounded backend: no longer than the deadline."""
        left = time_left()
        self._released.wait(seconds if left is None else min(seconds, left))
        if left is not None and left < seconds:
            raise DeadlineError("an injected delay used up the deadline")

    def _fail_some(self, statuses: list[Status]) -> list[Status]:
        return [Status.FAILED if self._chance(self._plan.page_error_rate) else status for status in statuses]

    def _chance(self, rate: float) -> bool:
        if rate == 0:
            return False
        with self._lock:
            return self._random.random() < rate

    def _flip(self, memory: memoryview) -> None:
        with self._lock:
            bit = self._random.randrange(len(memory) * 8)
        memory[bit // 8] ^= 1 << bit % 8
