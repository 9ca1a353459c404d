"""Bounds every call, and keeps late work away from the caller's memory.

A bounded backend ends by itself at ``time_left()``; here it only gets its deadline. Any other
backend may sit in a socket for ever, so it works in a thread of ours and on memory of ours, and
the caller copies what arrived in time. That copy is the price of a backend that cannot be called
off; memory for it is capped by cutting batches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.bounce import BounceMemory, cut
from hicache_storage.buffers import Page, copy, page_nbytes
from hicache_storage.deadline import deadline
from hicache_storage.errors import ClosedError, DeadlineError, RequestError, StorageError
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status, check_batch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds a call may take; None means that it may take for ever."""

    exists: float | None = 1.0
    get: float | None = 5.0
    set: float | None = 10.0


class DeadlineLayer(Layer):
    """Every call returns within its deadline: late pages are TIMED_OUT, late calls DeadlineError.

    At most ``threads`` calls can be stuck in an unbounded backend; further ones wait their time
    for a thread, which the breaker above spares them.
    """

    CLOSE_SECONDS = 5.0

    def __init__(self, inner: HiCacheStorage, deadlines: Deadlines, threads: int = 8) -> None:
        super().__init__(inner)
        self._deadlines = deadlines
        self._bounces = BounceMemory(inner)
        self._pool = None if inner.capabilities.bounded else BatchPool(threads, "hicache-deadline")
        self._closed = False

    def get(self, key: str) -> ReadableBuffer | None:
        with deadline(self._deadlines.get):
            if self._pool is None:
                return self.inner.get(key)
            return self._pool.call(lambda _: self.inner.get(key))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        with deadline(self._deadlines.set):
            if self._pool is None:
                return self.inner.set(key, value)
            mine = memoryview(bytes(value))
            return self._pool.call(lambda _: self.inner.set(key, mine))

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        with deadline(self._deadlines.exists):
            if self._pool is None:
                return self.inner.batch_exists(keys)
            return self._pool.call(lambda _: self.inner.batch_exists(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with deadline(self._deadlines.get):
            if self._pool is None:
                return self.inner.batch_get_into(keys, pages)
            return self._through_bounce("get", keys, pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with deadline(self._deadlines.set):
            if self._pool is None:
                return self.inner.batch_set_from(keys, pages)
            return self._through_bounce("set", keys, pages)

    def describe(self) -> dict[str, str]:
        limits = self._deadlines
        seconds = f"exists {limits.exists} s, get {limits.get} s, set {limits.set} s"
        return {**self.inner.describe(), "deadlines": seconds}

    def close(self) -> None:
        if self._pool is None:
            self.inner.close()
            return
        if self._closed:
            return
        self._closed = True
        try:
            with deadline(self.CLOSE_SECONDS):
                self._pool.call(lambda _: self._bounces.close())
                self._pool.call(lambda _: self.inner.close())
        except DeadlineError:
            logger.warning(
                "the backend did not close in %s s; its threads are left behind", self.CLOSE_SECONDS
            )
        self._pool.close(timeout=0.1)

    def _through_bounce(
        self, direction: Literal["get", "set"], keys: Sequence[str], pages: Sequence[Page]
    ) -> list[Status]:
        """Run a batch in threads of ours; pages are touched only while their caller waits.

        Two threads share its parts, so that one copies while the other is in the backend.
        """
        assert self._pool is not None
        statuses = [Status.TIMED_OUT] * len(pages)
        sizes = [page_nbytes(page) for page in pages]
        parts = list(cut(sizes))
        failed: dict[int, StorageError] = {}
        fatal: list[Exception] = []

        def work(number: int, lease: Lease) -> Status:
            try:
                move(parts[number], lease)
            except DeadlineError:
                return Status.TIMED_OUT  # as its pages already say; what was done in time stands
            except (RequestError, ClosedError) as error:
                fatal.append(error)
            except StorageError as error:
                failed[number] = error
            except Exception as error:
                fatal.append(error)
            return Status.OK

        def move(part: slice, lease: Lease) -> None:
            mine = self._bounces.pages(sizes[part])
            bounced = [(buffer,) for buffer in mine]
            if direction == "set":
                for page, bounce in zip(pages[part], bounced, strict=True):
                    with lease.held():
                        copy(page, bounce)
                got = self.inner.batch_set_from(keys[part], bounced)
            else:
                got = self.inner.batch_get_into(keys[part], bounced)
            for i, status, bounce in zip(range(part.start, part.stop), got, bounced, strict=True):
                with lease.held():
                    if status and direction == "get":
                        copy(bounce, pages[i])
                    statuses[i] = status

        self._pool.run(len(parts), work, width=2)
        if fatal or (failed and len(failed) == len(parts)):
            raise (fatal or list(failed.values()))[0]
        for number, error in list(failed.items()):
            part = parts[number]
            statuses[part] = [Status.of(error)] * (part.stop - part.start)
        return statuses
