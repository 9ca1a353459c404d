"""Requests side by side, for calls that end by their deadline whether or not they are answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.errors import DeadlineError, StorageError
from hicache_storage.storage import Status

T = TypeVar("T")


class Answers(Generic[T]):
    """What came back from each request, in order: a value, or an error."""

    def __init__(self, values: list[list[T]], errors: list[StorageError | None]) -> None:
        self._values = values
        self._errors = errors

    def __getitem__(self, index: int) -> T:
        """The value of one request. Raises the StorageError that it ended with."""
        if self._values[index]:
            return self._values[index][0]
        raise self._errors[index] or DeadlineError("the store did not answer in time")

    def get(self, index: int) -> T | None:
        """The value of one request, None when it failed."""
        return self._values[index][0] if self._values[index] else None


def ask(pool: BatchPool, requests: Sequence[Callable[[], T]]) -> Answers[T]:
    """Send all requests in the pool's threads and wait for their answers, or for the deadline.

    Raises ClosedError.
    """
    values: list[list[T]] = [[] for _ in requests]
    errors: list[StorageError | None] = [None] * len(requests)

    def work(i: int, _: Lease) -> Status:
        try:
            values[i].append(requests[i]())
        except StorageError as error:
            errors[i] = error
            raise
        return Status.OK

    pool.run(len(requests), work)
    return Answers(values, errors)


def ask_one(pool: BatchPool, request: Callable[[], T]) -> T:
    """What one request answers. Raises the StorageError it ends with, or DeadlineError."""
    return ask(pool, [request])[0]
