"""Calls that end in time although the file system may not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hicache_storage.batch_pool import BatchPool
from hicache_storage.deadline import time_left
from hicache_storage.directory.oserrors import translate

T = TypeVar("T")


def in_time(pool: BatchPool | None, call: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
    """What ``call`` returns. Raises DeadlineError when the deadline passes first.

    Without a deadline, or without a pool, it runs in this thread, else in one of the pool's. ``late``
    takes what it returns when nobody waits for it any more. An OSError comes out as the StorageError
    it means.
    """
    try:
        if pool is None or time_left() is None:
            return call()
        return pool.call(lambda _: call(), late)
    except OSError as error:
        raise translate(error) from error
