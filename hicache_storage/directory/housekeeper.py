"""The one background thread of an open store: evicts, recounts, cleans up after dead writers.

Every process has one and all do the same, but only the holder of ``evict.lock`` works; the kernel
takes the lock back when its holder dies, so there is no daemon and nothing to recover.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass

from hicache_storage.directory.evict import Remover, free
from hicache_storage.directory.locks import open_lock, try_lock, unlock
from hicache_storage.directory.staging import Staging
from hicache_storage.directory.tree import SHARDS, Tree
from hicache_storage.directory.usage import Usage

logger = logging.getLogger(__name__)

TICK_SECONDS = 5.0
"""How often it looks, when nobody asks, whether the disk fills up or the tree was removed."""

POLL_SECONDS = 0.05
"""How often a writer that waits for room looks again; the room may come from another process."""

HOPELESS_SECONDS = 1.0
"""For so long after an eviction that found nothing to remove, writers do not wait for another."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of the store, in bytes."""

    capacity: int
    min_free: int
    high: int
    """Eviction starts above it."""
    low: int
    """Eviction ends below it."""


class Housekeeper:
    """Starts its thread when made; ``close`` ends it."""

    def __init__(self, tree: Tree, usage: Usage, staging: Staging, limits: Limits) -> None:
        self._tree = tree
        self._usage = usage
        self._staging = staging
        self._limits = limits
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._done = threading.Condition()
        self._wanted = 0
        self._pressed = 0
        self._hopeless_until = 0.0
        self._next_shard = 0
        self._next_recount = time.monotonic() + TICK_SECONDS
        self._refresh = threading.Lock()
        self.evicted_pages = 0
        self.stuck_pages = 0
        """Pages that the last eviction could not remove."""
        self._thread = threading.Thread(target=self._run, name="hicache-housekeeper", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look now whether there is something to evict; returns at once."""
        self._wake.set()

    def make_room(self, nbytes: int, seconds: float) -> bool:
        """Ask for room for ``nbytes`` and wait a moment for it, at most ``seconds``.

        False when there is nothing left to evict, so that trying again is of no use.
        """
        with self._done:
            if time.monotonic() < self._hopeless_until:
                return False
            self._wanted = max(self._wanted, nbytes)
            self._wake.set()
            self._done.wait(min(seconds, POLL_SECONDS))
        return True

    def attainable(self) -> int:
        """Bytes there would be room for if all pages were evicted. Raises OSError."""
        return min(self._limits.capacity, self.spare() + self._usage.totals().nbytes)

    def press(self, nbytes: int) -> None:
        """The disk refused so many bytes, whatever it says about its free room (quotas, inodes)."""
        with self._done:
            self._pressed = max(self._pressed, nbytes)
        self._wake.set()

    def spare(self) -> int:
        """Bytes that the disk can take before ``min_free`` is touched. Raises OSError."""
        base = self._tree.base
        disk = os.fstatvfs(base.fd)
        return disk.f_bavail * disk.f_frsize - self._limits.min_free

    def refresh(self) -> None:
        """Begin anew where somebody has removed the tree, or parts of it. Raises OSError."""
        with self._refresh:
            self._tree.forget_removed()
            self._staging.forget_removed()
            if self._usage.forget_removed():
                self._usage.recount()

    def close(self, timeout: float = 5.0) -> None:
        """End the thread; one that is stuck in the store is left behind after ``timeout`` seconds."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(timeout)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._work()
            except OSError as error:
                logger.warning("housekeeping failed and will be tried again: %s", error)
            with self._done:
                self._done.notify_all()
            self._wake.wait(TICK_SECONDS)
            self._wake.clear()

    def _work(self) -> None:
        self.refresh()
        with self._done:
            wanted, self._wanted = self._wanted, 0
            pressed, self._pressed = self._pressed, 0
        abandoned = self._usage.abandoned()
        recount = abandoned or time.monotonic() >= self._next_recount
        if max(pressed, self._goal(wanted)) <= 0 and not recount:
            return
        lock = open_lock(self._tree.bookkeeping(), "evict.lock")
        if not try_lock(lock):
            return  # another process is at it
        try:
            goal = max(pressed, self._goal(wanted))  # it may have been done meanwhile
            if goal > 0:
                self._evict(goal)
            elif abandoned:
                self._usage.recount(abandoned)
            elif recount:
                self._recount()
        finally:
            unlock(lock)

    def _goal(self, wanted: int) -> int:
        """Bytes to remove so that the store is within its limits and has room for ``wanted``."""
        limits = self._limits
        wanted = min(wanted, self.attainable())
        used = self._usage.totals().nbytes
        over = 0
        if used > limits.high or used + wanted > limits.capacity:
            over = max(used - limits.low, used + wanted - limits.capacity)
        spare = self.spare() - wanted
        if spare < 0:
            over = max(over, -spare + limits.min_free // 10)
        return min(over, used)

    def _recount(self) -> None:
        """Set some more shards right, taking a thousandth of one core at most."""
        started = time.monotonic()
        self._staging.reap()
        for _ in range(SHARDS):
            self._usage.recount([self._next_shard])
            self._next_shard = (self._next_shard + 1) % SHARDS
            if time.monotonic() - started > TICK_SECONDS / 1000 or self._stopped.is_set():
                break
        self._next_recount = time.monotonic() + max(TICK_SECONDS, 1000 * (time.monotonic() - started))

    def _evict(self, goal: int) -> None:
        remover = Remover(self._tree, self._usage, quiet=self.stuck_pages > 0)
        free(self._tree, self._usage, goal, remover, self._stopped.is_set)
        self.evicted_pages += remover.pages
        self.stuck_pages = remover.stuck
        if remover.pages == 0 and not self._stopped.is_set():
            # also when the counters promised pages that are not there
            self._usage.recount()
            self._hopeless_until = time.monotonic() + HOPELESS_SECONDS
