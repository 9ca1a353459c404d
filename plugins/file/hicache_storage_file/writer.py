"""Stores the pages of a batch, one page a thread, each under its lease."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.directory.writer import Object, Outcome, Writer
from hicache_storage.errors import ClosedError, DeadlineError, StorageError
from hicache_storage.page_hook import PageWork
from hicache_storage.storage import Status
from hicache_storage_file.pageio import PageIO


class PageWriter:
    """Thread-safe, like all that it uses."""

    def __init__(self, writer: Writer, pageio: PageIO, pool: BatchPool) -> None:
        self._writer = writer
        self._pageio = pageio
        self._pool = pool

    def write(
        self,
        objects: Sequence[Object],
        contents: Sequence[Sequence[memoryview]],
        aligned: Sequence[bool],
        leaving: PageWork,
    ) -> list[Outcome]:
        """Store each object out of the pieces of its content, and say what became of it.

        ``aligned``: whether O_DIRECT can take the pieces as they lie in memory. ``leaving`` is done
        with each page before its bytes are read. Raises ClosedError.
        """

        def fill(numbers: Sequence[int]) -> list[Outcome]:
            started = [False] * len(numbers)
            errors: list[StorageError | None] = [None] * len(numbers)

            def work(n: int, lease: Lease) -> Status:
                with lease.held():
                    started[n] = True
                i = numbers[n]
                try:
                    with lease.held():
                        leaving(i)
                    write = partial(self._pageio.write, contents[i], aligned[i])
                    self._writer.put(objects[i], write, lease)
                except BaseException as error:
                    self._writer.release([objects[i]])
                    errors[n] = error if isinstance(error, StorageError) else None
                    raise
                return Status.OK

            try:
                statuses = self._pool.run(len(numbers), work)
            except ClosedError:
                self._writer.release([objects[i] for i in numbers])
                raise
            self._writer.release([objects[i] for i, begun in zip(numbers, started, strict=True) if not begun])
            return [
                None if status else error or _reason(status)
                for status, error in zip(statuses, errors, strict=True)
            ]

        return self._writer.write(objects, fill)


def _reason(status: Status) -> StorageError:
    if status is Status.TIMED_OUT:
        return DeadlineError("the page was not written in time")
    return StorageError("the page was not written; the reason was logged")
