"""One batch of files being read."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from hicache_storage import Buffer, DeadlineError, Page, RequestError, Status, StorageError, page_nbytes
from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import copy
from hicache_storage.directory.pagefile import open_page, touch
from hicache_storage.page_hook import page_work
from hicache_storage_nixl.access import Access
from hicache_storage_nixl.streams import Slots, Streams, live
from hicache_storage_nixl.transfers import Move

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _File:
    fd: int
    status: os.stat_result
    slot: Buffer | None


class Reading:
    """What is known of the batch; its streams, in several threads, share it."""

    def __init__(self, access: Access, keys: Sequence[str], pages: Sequence[Page]) -> None:
        """Raises InvalidKeyError."""
        self._access = access
        self._places = [access.directory.tree.locate(key) for key in keys]
        self._pages = pages
        self._sizes = [page_nbytes(page) for page in pages]
        self._statuses = [Status.TIMED_OUT] * len(keys)
        self._todo = iter(range(len(keys)))
        self._arrived = page_work()
        self._refused: RequestError | None = None

    def run(self, streams: Streams, *, direct: bool) -> list[Status]:
        """Read the pages and say what became of each. Raises RequestError, ClosedError."""
        in_time = streams.run(self._sizes, self._access.at_a_time(), self._stream, direct=direct)
        if self._refused is not None:
            raise self._refused
        statuses = list(self._statuses)  # a stream that is late goes on changing its own
        if in_time:
            return [Status.FAILED if status is Status.TIMED_OUT else status for status in statuses]
        return statuses

    def _stream(self, lease: Lease, slots: Slots) -> None:
        files: dict[int, _File] = {}
        width = self._access.width(self._pages) if slots is None else len(slots)

        def start(i: int, alone: bool) -> Move | None:
            slot = slots[-1] if slots is not None else None
            memory = self._pages[i] if slot is None else [slot.slice(0, self._sizes[i])]
            try:
                found = self._access.step(self._sizes[i], alone, partial(self._open, i, memory))
            except StorageError as error:
                logger.warning("%s is not read: %s", self._places[i].name, error)
                found = Status.FAILED
            if isinstance(found, Status):
                self._statuses[i] = found
                return None
            fd, status = found
            files[i] = _File(fd, status, slots.pop() if slots is not None else None)
            if self._sizes[i]:
                return Move([buffer for buffer in memory if buffer.nbytes], (fd, ""))
            landed(i, None)
            return None

        def landed(i: int, error: StorageError | None) -> None:
            file = files.pop(i)
            try:
                if error is None:
                    self._finish(i, file, lease)
                else:
                    self._fail(i, file, error)
            finally:
                os.close(file.fd)
                if slots is not None and file.slot is not None:
                    slots.append(file.slot)

        try:
            self._access.transfers.stream("READ", live(self._todo, lease), width, start, landed)
        finally:
            for file in files.values():
                os.close(file.fd)

    def _open(self, i: int, memory: Sequence[Buffer]) -> tuple[int, os.stat_result] | Status:
        """Raises OSError."""
        place = self._places[i]
        directory = self._access.directory.tree.shard(place)
        if directory is None:
            return Status.MISSING
        fd = open_page(directory, place.name, self._access.flags(memory))
        if isinstance(fd, Status):
            return fd
        try:
            status = os.fstat(fd)
        except BaseException:
            os.close(fd)
            raise
        if status.st_size == self._sizes[i] and stat.S_ISREG(status.st_mode):
            return fd, status
        os.close(fd)
        return Status.CORRUPT

    def _finish(self, i: int, file: _File, lease: Lease) -> None:
        with contextlib.suppress(DeadlineError), lease.held():
            if file.slot is not None:
                copy([file.slot.slice(0, self._sizes[i])], self._pages[i])
            self._arrived(i)
            self._statuses[i] = Status.OK
        touch(file.fd, file.status)

    def _fail(self, i: int, file: _File, error: StorageError) -> None:
        if isinstance(error, RequestError):
            self._refused = error
        self._statuses[i] = Status.FAILED
        with contextlib.suppress(OSError):
            if os.fstat(file.fd).st_size != self._sizes[i]:  # truncated since it was opened
                self._statuses[i] = Status.CORRUPT
