"""Makes a dead backend cost nothing, and is where errors end: above it there are only misses.

The first call that times out, or a few calls in a row that fail, open the breaker. While it is
open no call reaches the backend; a thread of its own probes until the backend answers again, so no
request pays for finding out. Reads and writes have a circuit each: a full disk refuses writes and
must not stop reads.

The negative cache is for existence that lies: a store whose ``exists`` says yes while ``get`` fails
makes every request pay for both (sglang issue 31315). A key that failed after it was said to be
there is absent for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache_storage.buffers import Page
from hicache_storage.errors import ClosedError, RequestError, StorageError, UnavailableError
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROBE_KEY = "0" * 32 + "/probe"


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """When to give up on a backend and when to ask it again."""

    failures: int = 3
    """Failing calls in a row that open a circuit; a call that timed out opens both at once."""
    cooldown: float = 0.5
    """Seconds before the first probe; doubled after each relapse."""
    max_cooldown: float = 30.0
    """Longest time between probes, in seconds."""
    negative_ttl: float = 10.0
    """Seconds for which a key that was there but could not be read counts as absent."""
    negative_keys: int = 65_536
    """Most keys remembered that way; the oldest are forgotten first."""


class Circuit:
    """Counts failures of one direction."""

    def __init__(self, name: str, policy: BreakerPolicy) -> None:
        self.name = name
        self.open = False
        self._policy = policy
        self._failures = 0
        self.cooldown = policy.cooldown

    def succeeded(self) -> None:
        self._failures = 0
        self.cooldown = self._policy.cooldown

    def failed(self, now: bool) -> bool:
        """Count a failing call; whether that opened the circuit."""
        self._failures += 1
        if self.open or not (now or self._failures >= self._policy.failures):
            return False
        self.open = True
        return True

    def half_close(self) -> None:
        """Let calls through again; one more failure before a success opens it for longer."""
        self.open = False
        self._failures = self._policy.failures - 1
        self.cooldown = min(self.cooldown * 2, self._policy.max_cooldown)


class KeyMemory:
    """Keys remembered for ``ttl`` seconds, at most ``limit`` of them; safe from several threads."""

    def __init__(self, ttl: float, limit: int) -> None:
        self._ttl = ttl
        self._limit = limit
        self._until: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str]) -> None:
        until = time.monotonic() + self._ttl
        with self._lock:
            for key in keys:
                self._until[key] = until
                self._until.move_to_end(key)
            while len(self._until) > self._limit:
                self._until.popitem(last=False)

    def discard(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._until.pop(key, None)

    def __contains__(self, key: str) -> bool:
        until = self._until.get(key)
        return until is not None and time.monotonic() < until

    def __len__(self) -> int:
        return len(self._until)


class BreakerLayer(Layer):
    """Answers with misses while the backend is down. Only RequestError and ClosedError pass."""

    def __init__(self, inner: HiCacheStorage, policy: BreakerPolicy) -> None:
        super().__init__(inner)
        self._reads = Circuit("reads", policy)
        self._writes = Circuit("writes", policy)
        self._said_present = KeyMemory(policy.negative_ttl, policy.negative_keys)
        self._absent = KeyMemory(policy.negative_ttl, policy.negative_keys)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._prober: threading.Thread | None = None

    @property
    def open(self) -> bool:
        """Whether any direction is cut off at the moment."""
        return self._reads.open or self._writes.open

    def get(self, key: str) -> ReadableBuffer | None:
        return self._guarded(self._reads, lambda: self.inner.get(key), None)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        def store() -> Status:
            self.inner.set(key, value)
            return Status.OK

        if not self._guarded(self._writes, store, Status.FAILED):
            raise UnavailableError(f"{key} was not stored: writes are failing at the moment")
        self._absent.discard([key])

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        found = self._guarded(self._reads, lambda: self.inner.batch_exists(keys), None)
        if not isinstance(found, list) or len(found) != len(keys):
            return [False] * len(keys)
        present = [there is True for there in found]  # a negative errno is truthy, and no page
        if len(self._absent):
            present = [there and key not in self._absent for key, there in zip(keys, present, strict=True)]
        self._said_present.add(key for key, there in zip(keys, present, strict=True) if there)
        return present

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = self._batch(self._reads, lambda: self.inner.batch_get_into(keys, pages), len(keys))
        if not self._reads.open and not all(statuses):
            lost = (key for key, status in zip(keys, statuses, strict=True) if not status)
            self._absent.add(key for key in lost if key in self._said_present)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = self._batch(self._writes, lambda: self.inner.batch_set_from(keys, pages), len(keys))
        if len(self._absent):
            self._absent.discard(key for key, status in zip(keys, statuses, strict=True) if status)
        return statuses

    def describe(self) -> dict[str, str]:
        state = ", ".join(f"{c.name} {'cut off' if c.open else 'on'}" for c in (self._reads, self._writes))
        return {**self.inner.describe(), "breaker": state}

    def close(self) -> None:
        self._closed.set()
        if self._prober is not None:
            self._prober.join(timeout=1.0)
        self.inner.close()

    def _batch(self, circuit: Circuit, call: Callable[[], list[Status]], count: int) -> list[Status]:
        statuses = self._guarded(circuit, call, None)
        if statuses is None:
            return [Status.FAILED] * count
        answered = isinstance(statuses, list) and len(statuses) == count
        if not answered or not all(isinstance(status, Status) for status in statuses):
            logger.error("the backend answered %d pages with %.80r; all count as failed", count, statuses)
            return [Status.FAILED] * count
        return statuses

    def _guarded(self, circuit: Circuit, call: Callable[[], T], miss: T) -> T:
        """What ``call`` returns, or ``miss`` when the circuit is open or the call fails."""
        if self._closed.is_set():
            raise ClosedError("the storage is closed")
        if circuit.open:
            return miss
        try:
            result = call()
        except (RequestError, ClosedError):
            raise
        except Exception as error:
            known = isinstance(error, StorageError)
            logger.warning("%s: %s", type(error).__name__, error, exc_info=not known)
            self._failed(circuit, Status.of(error) if isinstance(error, StorageError) else Status.FAILED)
            return miss
        statuses = set(result) if isinstance(result, list) else set()
        if Status.TIMED_OUT in statuses:
            self._failed(circuit, Status.TIMED_OUT)
        elif statuses == {Status.FAILED}:
            self._failed(circuit, Status.FAILED)
        else:
            circuit.succeeded()
        return result

    def _failed(self, circuit: Circuit, status: Status) -> None:
        """Count a failure, and start probing when it opened a circuit."""
        with self._lock:
            now = status is Status.TIMED_OUT
            opened = [c for c in ((self._reads, self._writes) if now else (circuit,)) if c.failed(now)]
            if not opened:
                return
            logger.warning(
                "the backend is failing: no %s until it answers a probe", " or ".join(c.name for c in opened)
            )
            if self._prober is None or not self._prober.is_alive():
                self._prober = threading.Thread(target=self._probe, name="hicache-probe", daemon=True)
                self._prober.start()

    def _probe(self) -> None:
        """Ask the backend now and then, until it answers; runs in a thread of its own."""
        while not self._closed.wait(max(c.cooldown for c in (self._reads, self._writes) if c.open)):
            try:
                self.inner.batch_exists([PROBE_KEY])
            except Exception as error:
                logger.debug("probe: %s", error)
                continue
            with self._lock:
                for circuit in (self._reads, self._writes):
                    if circuit.open:
                        circuit.half_close()
                self._prober = None
            logger.warning("the backend answers again")
            return
