"""Stores the pages of a batch: room first, then the bytes, then the name."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.deadline import time_left
from hicache_storage.errors import CapacityError, ClosedError, DeadlineError, StorageError
from hicache_storage.storage import Status
from hicache_storage_file.bounded import in_time
from hicache_storage_file.housekeeper import Housekeeper, Limits
from hicache_storage_file.oserrors import FREEABLE, NO_DESCRIPTORS, translate
from hicache_storage_file.pageio import TOUCH_SECONDS, PageIO
from hicache_storage_file.staging import Staging
from hicache_storage_file.tree import Place, Tree
from hicache_storage_file.usage import Usage, discard

logger = logging.getLogger(__name__)

ROOM_SECONDS = 1.0
"""How long one call waits for eviction, all its pages together."""


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Object:
    """What to store where."""

    place: Place
    pieces: Sequence[memoryview]
    nbytes: int
    aligned: bool
    """Whether O_DIRECT can take the pieces as they lie in memory."""
    prepare: Callable[[], None] = _nothing
    """To be run under the page's lease before its bytes are read."""


class Writer:
    """Thread-safe, like all that it uses."""

    def __init__(
        self,
        tree: Tree,
        usage: Usage,
        staging: Staging,
        pageio: PageIO,
        housekeeper: Housekeeper,
        limits: Limits,
        lookups: BatchPool,
        writers: BatchPool,
    ) -> None:
        self._tree = tree
        self._usage = usage
        self._staging = staging
        self._pageio = pageio
        self._housekeeper = housekeeper
        self._limits = limits
        self._lookups = lookups
        self._writers = writers
        self._lock = threading.Lock()
        self._logged: set[type[StorageError]] = set()
        self.refused = 0
        """Pages that were not stored, for whatever reason."""

    def write(self, objects: Sequence[Object]) -> list[StorageError | None]:
        """Store the objects; None for each that is there now, else why it is not.

        An object that is there in its size already is not written again: the same key means the
        same bytes, and one that was found corrupt has been deleted. Raises ClosedError.
        """
        outcomes: list[StorageError | None] = [None] * len(objects)
        todo: list[int] = list(range(len(objects)))
        try:
            todo = in_time(self._lookups, lambda: self._absent(objects))
            ends_at = time.monotonic() + _patience(time_left())
            while todo:
                granted = self._reserve([objects[i] for i in todo])
                if granted:
                    now, todo = todo[:granted], todo[granted:]
                    written = self._write_reserved([objects[i] for i in now])
                    for i, error in zip(now, written, strict=True):
                        outcomes[i] = error
                    self._settle()
                elif not self._wait_for_room([objects[i] for i in todo], ends_at):
                    raise CapacityError("the store is full and eviction made no room in time")
        except ClosedError:
            raise
        except StorageError as error:
            for i in todo:
                outcomes[i] = error
        self._count([error for error in outcomes if error is not None])
        return outcomes

    def _absent(self, objects: Sequence[Object]) -> list[int]:
        """Which objects are not stored; those that are count as used now."""
        absent = []
        for i, item in enumerate(objects):
            found = self._found(item)
            if found is None or not _is_whole(found, item):
                absent.append(i)
            elif not 0 <= time.time() - found.st_mtime < TOUCH_SECONDS:
                directory = self._tree.shard(item.place)
                with contextlib.suppress(OSError):
                    if directory is not None:
                        os.utime(item.place.name, dir_fd=directory.fd, follow_symlinks=False)
        return absent

    def _found(self, item: Object) -> os.stat_result | None:
        """What stands under the object's name now."""
        place = item.place
        directory = self._tree.shard(place)
        # access first: a stat that finds nothing costs an exception
        if directory is None or not os.access(
            place.name, os.F_OK, dir_fd=directory.fd, follow_symlinks=False
        ):
            return None
        try:
            return os.stat(place.name, dir_fd=directory.fd, follow_symlinks=False)
        except OSError:
            return None

    def _reserve(self, objects: Sequence[Object]) -> int:
        """Reserve room for as many of the objects, from the first on, as there is room for."""

        def reserve() -> int:
            wants = [(item.place.shard, item.nbytes) for item in objects]
            granted, used = self._usage.reserve(wants, self._limits.capacity, self._housekeeper.spare())
            if used > self._limits.high:
                self._housekeeper.wake()
            return granted

        return in_time(self._lookups, reserve, late=lambda granted: self._release(objects[:granted]))

    def _settle(self) -> None:
        """Let others know what became of the reservations; what fails here is done by the next call."""
        with contextlib.suppress(StorageError):
            in_time(self._lookups, self._usage.totals)

    def _release(self, objects: Sequence[Object]) -> None:
        for item in objects:
            self._usage.released(item.place.shard, item.nbytes)

    def _wait_for_room(self, objects: Sequence[Object], ends_at: float) -> bool:
        seconds = ends_at - time.monotonic()
        if seconds <= 0 or objects[0].nbytes > in_time(self._lookups, self._housekeeper.attainable):
            return False
        return self._housekeeper.make_room(sum(item.nbytes for item in objects), seconds)

    def _write_reserved(self, objects: Sequence[Object]) -> list[StorageError | None]:
        started = [False] * len(objects)
        errors: list[StorageError | None] = [None] * len(objects)

        def work(i: int, lease: Lease) -> Status:
            with lease.held():
                started[i] = True
            try:
                with lease.held():
                    objects[i].prepare()
                self._write(objects[i], lease)
            except BaseException as error:
                self._release([objects[i]])
                errors[i] = error if isinstance(error, StorageError) else None
                raise
            return Status.OK

        try:
            statuses = self._writers.run(len(objects), work)
        except ClosedError:
            self._release(objects)
            raise
        self._release([item for item, begun in zip(objects, started, strict=True) if not begun])
        return [
            None if status else error or _reason(status)
            for status, error in zip(statuses, errors, strict=True)
        ]

    def _write(self, item: Object, lease: Lease) -> None:
        """Write and publish one object. Raises StorageError."""
        for last_try in (False, True):
            try:
                self._write_once(item, lease)
                return
            except OSError as error:
                if error.errno in NO_DESCRIPTORS and not last_try:
                    self._tree.shed()
                elif isinstance(error, FileNotFoundError) and not last_try:
                    self._refresh()
                else:
                    if error.errno in FREEABLE:
                        self._housekeeper.press(item.nbytes)
                    raise translate(error) from error

    def _write_once(self, item: Object, lease: Lease) -> None:
        staging = self._staging.directory()
        name = self._staging.new_name()
        self._pageio.write(staging, name, item.pieces, item.aligned)
        try:
            # all bytes were read while the lease was live, or they may be those of another page
            if lease.withdrawn:
                raise DeadlineError("the page was written too late")
            directory = self._tree.make_shard(item.place)
            found = self._found(item)
            if found is not None and _is_whole(found, item):  # another writer was faster
                os.unlink(name, dir_fd=staging.fd)
                self._release([item])
                return
            if found is not None:
                discard(self._usage, directory, item.place)
            os.rename(name, item.place.name, src_dir_fd=staging.fd, dst_dir_fd=directory.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=staging.fd)
            raise
        self._usage.stored(item.place.shard, item.nbytes)

    def _refresh(self) -> None:
        try:
            self._housekeeper.refresh()
        except OSError as error:
            raise translate(error) from error

    def _count(self, errors: Sequence[StorageError]) -> None:
        if not errors:
            return
        with self._lock:
            self.refused += len(errors)
            new = {type(error): error for error in errors if type(error) not in self._logged}
            self._logged.update(new)
        for error in new.values():
            logger.warning("pages are not stored (said once, then counted): %s", error)


def _is_whole(found: os.stat_result, item: Object) -> bool:
    return found.st_size == item.nbytes and stat.S_ISREG(found.st_mode)


def _reason(status: Status) -> StorageError:
    if status is Status.TIMED_OUT:
        return DeadlineError("the page was not written in time")
    return StorageError("the page was not written; the reason was logged")


def _patience(left: float | None) -> float:
    """Seconds to wait for room; half of what is left, so that there is time to say that there is none."""
    return ROOM_SECONDS if left is None else min(ROOM_SECONDS, left / 2)
