"""One batch of files being written."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from hicache_storage import (
    Buffer,
    ClosedError,
    DeadlineError,
    Page,
    RequestError,
    StorageError,
    UnavailableError,
    page_nbytes,
)
from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import copy
from hicache_storage.directory.pagefile import create_page
from hicache_storage.directory.tree import Directory
from hicache_storage.directory.writer import Object, Outcome
from hicache_storage.page_hook import page_work
from hicache_storage_nixl.access import Access
from hicache_storage_nixl.streams import Slots, Streams, live
from hicache_storage_nixl.transfers import Move


@dataclass(frozen=True, slots=True)
class _File:
    fd: int
    staging: Directory
    name: str
    slot: Buffer | None = None


class Writing:
    """What is known of the batch; its streams, in several threads, share it."""

    def __init__(self, access: Access, keys: Sequence[str], pages: Sequence[Page]) -> None:
        """Raises InvalidKeyError."""
        self._access = access
        self._writer = access.directory.writer
        self._objects = [
            Object(access.directory.tree.locate(key), page_nbytes(page))
            for key, page in zip(keys, pages, strict=True)
        ]
        self._pages = pages
        self._leaving = page_work()

    def run(self, streams: Streams, *, direct: bool) -> list[Outcome]:
        """Store the pages and say what became of each. Raises RequestError, ClosedError."""
        outcomes = self._writer.write(self._objects, lambda numbers: self._fill(numbers, streams, direct))
        for error in outcomes:
            if isinstance(error, RequestError):
                raise error
        return outcomes

    def _fill(self, numbers: Sequence[int], streams: Streams, direct: bool) -> list[Outcome]:
        todo = iter(numbers)
        outcomes: dict[int, Outcome] = {}

        def stream(lease: Lease, slots: Slots) -> None:
            self._stream(live(todo, lease), outcomes, lease, slots)

        sizes = [self._objects[i].nbytes for i in numbers]
        try:
            in_time = streams.run(sizes, self._access.at_a_time(), stream, direct=direct)
        except ClosedError:
            self._writer.release([self._objects[i] for i in todo])
            raise
        self._writer.release([self._objects[i] for i in todo])  # those that no stream has begun
        missing = (
            UnavailableError("the page was not written; the reason was logged")
            if in_time
            else DeadlineError("the page was not written in time")
        )
        return [outcomes.get(i, missing) for i in numbers]

    def _stream(self, todo: Iterator[int], outcomes: dict[int, Outcome], lease: Lease, slots: Slots) -> None:
        files: dict[int, _File] = {}
        width = self._access.width(self._pages) if slots is None else len(slots)

        def failed(i: int, error: StorageError) -> None:
            self._writer.release([self._objects[i]])
            outcomes[i] = error

        def start(i: int, alone: bool) -> Move | None:
            slot = slots[-1] if slots is not None else None
            memory = self._pages[i] if slot is None else [slot.slice(0, self._objects[i].nbytes)]
            try:
                with lease.held():
                    self._leaving(i)
                    if slot is not None:
                        copy(self._pages[i], memory)
                file = self._access.step(self._objects[i].nbytes, alone, partial(self._create, memory))
            except StorageError as error:
                failed(i, error)
                return None
            if slots is not None:
                slots.pop()
            files[i] = _File(file.fd, file.staging, file.name, slot)
            if self._objects[i].nbytes:
                return Move([buffer for buffer in memory if buffer.nbytes], (file.fd, ""))
            landed(i, None)
            return None

        def landed(i: int, error: StorageError | None) -> None:
            file = files.pop(i)
            try:
                self._publish(self._objects[i], file, error)
                outcomes[i] = None
            except StorageError as reason:
                failed(i, reason)
            finally:
                os.close(file.fd)
                if slots is not None and file.slot is not None:
                    slots.append(file.slot)

        try:
            self._access.transfers.stream("WRITE", todo, width, start, landed)
        finally:
            for i, file in files.items():
                os.close(file.fd)
                _unlink(file)
                failed(i, UnavailableError("the page was not written; the reason was logged"))

    def _create(self, memory: Sequence[Buffer]) -> _File:
        """Raises OSError."""
        staging = self._access.directory.staging.directory()
        name = self._access.directory.staging.new_name()
        flags = self._access.flags(memory)
        file = _File(create_page(staging, name, flags), staging, name)
        if flags & os.O_DIRECT:
            _reserve(file, sum(buffer.nbytes for buffer in memory))
        return file

    def _publish(self, item: Object, file: _File, error: StorageError | None) -> None:
        """Give a file that was written its place; else remove it and raise StorageError."""
        try:
            if error is not None:
                # NIXL says that it failed, the file system says why
                room = partial(os.posix_fallocate, file.fd, 0, max(1, item.nbytes))
                self._writer.attempt(item.nbytes, room)
                raise error
            self._writer.attempt(item.nbytes, partial(self._writer.publish, item, file.staging, file.name))
        except BaseException:
            _unlink(file)
            raise


def _reserve(file: _File, nbytes: int) -> None:
    """Have the disk find room first: kernel AIO waits for that otherwise, one page after the other.

    Raises OSError, having removed the file.
    """
    try:
        os.posix_fallocate(file.fd, 0, nbytes)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):  # a file system that cannot: it is but slower
            return
        os.close(file.fd)
        _unlink(file)
        raise


def _unlink(file: _File) -> None:
    with contextlib.suppress(OSError):
        os.unlink(file.name, dir_fd=file.staging.fd)
