"""Sends a failed request again: inside the deadline, after a pause of random length.

Pauses have full jitter: uniform between nothing and a bound that doubles (Brooker, "Exponential
Backoff And Jitter", AWS Architecture Blog). When the service says SlowDown, all threads of the
backend hold back, not just the one that was told.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from hicache_storage.deadline import time_left
from hicache_storage.errors import DeadlineError, StorageError
from hicache_storage_s3.s3errors import SlowDownError

T = TypeVar("T")

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 2.0
SLOW_FACTOR = 4.0


class Persistence:
    """How often and how patiently one backend asks again. Thread-safe."""

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._slow_until = 0.0
        self._lock = threading.Lock()
        self.retried = 0
        """Requests that were sent again."""
        self.slowed = 0
        """Times the service asked for fewer requests."""

    def call(self, request: Callable[[], T]) -> T:
        """What ``request`` returns, or the StorageError of its last try."""
        for attempt in range(self._retries + 1):
            self._hold_back()
            try:
                return request()
            except StorageError as error:
                if not error.retryable or attempt == self._retries:
                    raise
                pause = random.uniform(0, min(LONGEST_PAUSE, FIRST_PAUSE * 2**attempt))
                if isinstance(error, SlowDownError):
                    pause *= SLOW_FACTOR
                    self._slow_down(pause)
                left = time_left()
                if left is not None and left <= pause:
                    raise
                with self._lock:
                    self.retried += 1
            time.sleep(pause)
        raise AssertionError("unreachable")

    def _slow_down(self, seconds: float) -> None:
        with self._lock:
            self.slowed += 1
            self._slow_until = max(self._slow_until, time.monotonic() + seconds)

    def _hold_back(self) -> None:
        pause = self._slow_until - time.monotonic()
        if pause <= 0:
            return
        left = time_left()
        if left is not None and left <= pause:
            raise DeadlineError("the store asks for fewer requests, and there is no time left to wait")
        time.sleep(pause)
