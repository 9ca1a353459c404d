"""Calls that end in time although the file system may not answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.deadline import time_left
from hicache_storage.errors import DeadlineError, StorageError
from hicache_storage.storage import Status
from hicache_storage_file.oserrors import translate

T = TypeVar("T")


def in_time(pool: BatchPool, call: Callable[[], T], late: Callable[[T], None] | None = None) -> T:
    """What ``call`` returns. Raises DeadlineError when the deadline passes first.

    Without a deadline it runs in this thread, else in one of the pool's. ``late`` takes what it
    returns when nobody waits for it any more. An OSError comes out as the StorageError it means.
    """
    if time_left() is None:
        try:
            return call()
        except OSError as error:
            raise translate(error) from error
    returned: list[T] = []
    raised: list[StorageError] = []

    def work(_: int, lease: Lease) -> Status:
        try:
            value = call()
        except OSError as error:
            raised.append(translate(error))
            raised[0].__cause__ = error
            return Status.FAILED
        except StorageError as error:
            raised.append(error)
            return Status.FAILED
        try:
            with lease.held():
                returned.append(value)
        except DeadlineError:
            if late is not None:
                late(value)
            raise
        return Status.OK

    status = pool.run(1, work)[0]
    if returned:
        return returned[0]
    if raised:
        raise raised[0]
    if status is Status.TIMED_OUT:
        raise DeadlineError("the file system did not answer in time")
    raise StorageError("the call failed in a way that was logged")
