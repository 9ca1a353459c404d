"""Stores the pages of a batch: room first, then the bytes, then the name.

How the bytes get into a file is the backend's own business: it fills files of the directory for
pages in the making, one by one or many at once, and publishes each that is whole.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.deadline import time_left
from hicache_storage.directory.bounded import in_time
from hicache_storage.directory.housekeeper import Housekeeper, Limits
from hicache_storage.directory.oserrors import FREEABLE, NO_DESCRIPTORS, translate
from hicache_storage.directory.pagefile import TOUCH_SECONDS
from hicache_storage.directory.staging import Staging
from hicache_storage.directory.tree import Directory, Place, Tree
from hicache_storage.directory.usage import Usage, discard
from hicache_storage.errors import CapacityError, ClosedError, DeadlineError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROOM_SECONDS = 1.0
"""How long one call waits for eviction, all its pages together."""


@dataclass(frozen=True, slots=True)
class Object:
    """What is to be stored where."""

    place: Place
    nbytes: int


Outcome: TypeAlias = StorageError | None
"""None for an object that is there now, else why it is not."""

Fill: TypeAlias = Callable[[Sequence[int]], list[Outcome]]
"""Writes the objects with these numbers, for which there is room, and publishes or releases each."""

WriteFile: TypeAlias = Callable[[Directory, str], None]
"""Writes one object to a new file of this name in this directory. May raise OSError, StorageError."""


class Writer:
    """Thread-safe, like all that it uses."""

    def __init__(
        self,
        tree: Tree,
        usage: Usage,
        staging: Staging,
        housekeeper: Housekeeper,
        limits: Limits,
        lookups: BatchPool | None,
    ) -> None:
        """``lookups`` bounds the steps around ``Fill``; without it they take as long as they take."""
        self._tree = tree
        self._usage = usage
        self._staging = staging
        self._housekeeper = housekeeper
        self._limits = limits
        self._lookups = lookups
        self._lock = threading.Lock()
        self._logged: set[type[StorageError]] = set()
        self.refused = 0
        """Pages that were not stored, for whatever reason."""

    def write(self, objects: Sequence[Object], fill: Fill) -> list[Outcome]:
        """Store the objects and say what became of each.

        An object that is there in its size already is not written again: the same key means the
        same bytes, and one that was found corrupt has been deleted. Raises ClosedError.
        """
        outcomes: list[Outcome] = [None] * len(objects)
        todo: list[int] = list(range(len(objects)))
        try:
            todo = in_time(self._lookups, lambda: self._absent(objects))
            ends_at = time.monotonic() + _patience(time_left())
            while todo:
                granted = self._reserve([objects[i] for i in todo])
                if granted:
                    now = todo[:granted]
                    for i, outcome in zip(now, fill(now), strict=True):
                        outcomes[i] = outcome
                    todo = todo[granted:]
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

    def put(self, item: Object, write: WriteFile, lease: Lease) -> None:
        """Write one object for which there is room, and publish it.

        ``lease``: that of the memory which the object's bytes come from. Raises StorageError; the
        reservation is left then.
        """
        self.attempt(item.nbytes, partial(self._put_once, item, write, lease))

    def attempt(self, nbytes: int, step: Callable[[], T]) -> T:
        """Take a step towards storing ``nbytes``, once more if what hindered it could be mended.

        Raises StorageError.
        """
        for last_try in (False, True):
            try:
                return step()
            except OSError as error:
                if error.errno in NO_DESCRIPTORS and not last_try:
                    self._tree.shed()
                elif isinstance(error, FileNotFoundError) and not last_try:
                    self._refresh()
                else:
                    if error.errno in FREEABLE:
                        self._housekeeper.press(nbytes)
                    raise translate(error) from error
        raise AssertionError("the last try returns or raises")

    def publish(self, item: Object, staging: Directory, name: str) -> None:
        """Give the file ``name``, which holds all of the object, its place.

        The room is used from now on, or free again if another writer was faster. Raises OSError; the
        file and the reservation are left then.
        """
        directory = self._tree.make_shard(item.place)
        found = self._found(item)
        if found is not None and _is_whole(found, item):
            os.unlink(name, dir_fd=staging.fd)
            self.release([item])
            return
        if found is not None:
            discard(self._usage, directory, item.place)
        os.rename(name, item.place.name, src_dir_fd=staging.fd, dst_dir_fd=directory.fd)
        self._usage.stored(item.place.shard, item.nbytes)

    def release(self, objects: Sequence[Object]) -> None:
        """Give back the room of objects that will not be written."""
        for item in objects:
            self._usage.released(item.place.shard, item.nbytes)

    def _put_once(self, item: Object, write: WriteFile, lease: Lease) -> None:
        staging = self._staging.directory()
        name = self._staging.new_name()
        try:
            write(staging, name)
            # all bytes were read while the lease was live, or they may be those of another page
            if lease.withdrawn:
                raise DeadlineError("the page was written too late")
            self.publish(item, staging, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=staging.fd)
            raise

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

        return in_time(self._lookups, reserve, late=lambda granted: self.release(objects[:granted]))

    def _settle(self) -> None:
        """Let others know what became of the reservations; what fails here is done by the next call."""
        with contextlib.suppress(StorageError):
            in_time(self._lookups, self._usage.totals)

    def _wait_for_room(self, objects: Sequence[Object], ends_at: float) -> bool:
        seconds = ends_at - time.monotonic()
        if seconds <= 0 or objects[0].nbytes > in_time(self._lookups, self._housekeeper.attainable):
            return False
        return self._housekeeper.make_room(sum(item.nbytes for item in objects), seconds)

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


def _patience(left: float | None) -> float:
    """Seconds to wait for room; half of what is left, so that there is time to say that there is none."""
    return ROOM_SECONDS if left is None else min(ROOM_SECONDS, left / 2)
