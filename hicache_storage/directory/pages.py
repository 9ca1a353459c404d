"""A directory of pages as a backend uses it: all but how bytes get into files and out of them."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hicache_storage.batch_pool import BatchPool
from hicache_storage.directory.bounded import in_time
from hicache_storage.directory.direct import direct_works
from hicache_storage.directory.evict import Remover
from hicache_storage.directory.housekeeper import Housekeeper, Limits
from hicache_storage.directory.oserrors import NO_ROOM
from hicache_storage.directory.settings import RoomSettings, room_nbytes
from hicache_storage.directory.staging import Staging
from hicache_storage.directory.tree import SHARDS, Place, Tree
from hicache_storage.directory.usage import Usage, discard
from hicache_storage.directory.writer import Writer
from hicache_storage.errors import SettingsError, UnavailableError
from hicache_storage.namespace import Namespace

logger = logging.getLogger(__name__)


class PageDirectory:
    """The pages under ``root``, shared with every process that opens the same directory.

    It costs one thread, and at most 256 directory descriptors a namespace, which are closed with the
    last reference. Thread-safe; of no use in a child that was forked after it was opened.
    """

    def __init__(
        self, root: Path, room: RoomSettings, namespace: Namespace, lookups: BatchPool | None = None
    ) -> None:
        """``lookups``: threads that end calls by their deadline; without them calls take what they take.

        Raises SettingsError when there is room for nothing, OSError when the directory is of no use.
        """
        self.pid = os.getpid()
        self.tree = Tree(root.expanduser())
        self._lookups = lookups
        self._namespace = namespace
        self._limits = _limits(self.tree, room)
        self._usage = Usage(self.tree)
        self.staging = Staging(self.tree, self._usage.abandon_reservations)
        with _though_full():
            self.staging.directory()
        with _though_full():
            self.tree.introduce(namespace)
        if not self._usage.known():
            self._usage.recount()
        self._housekeeper = Housekeeper(self.tree, self._usage, self.staging, self._limits)
        self.writer = Writer(
            self.tree, self._usage, self.staging, self._housekeeper, self._limits, self._lookups
        )

    def can_direct(self) -> bool:
        """Whether O_DIRECT works here; not known, so False, while there is no room to try it."""
        try:
            return direct_works(self.staging.directory())
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Whether there is something under each key. Raises InvalidKeyError, DeadlineError."""
        return in_time(self._lookups, lambda: self.tree.present(keys))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove all that can be removed, then raise StorageError for the first that cannot."""
        places = [self.tree.locate(key) for key in keys]
        in_time(self._lookups, lambda: self._delete(places))

    def clear(self) -> None:
        """Remove every page of the namespace; directories stay.

        Pages that another process stores meanwhile may stay. Raises UnavailableError, having
        removed all others, when pages cannot be removed.
        """
        stuck = in_time(self._lookups, self._clear)
        if stuck:
            raise UnavailableError(f"{stuck} pages cannot be removed")

    def describe(self) -> dict[str, str]:
        """Facts for an operator. Raises StorageError."""
        return in_time(self._lookups, self._describe)

    def close(self) -> None:
        """End the thread and let go of the directory; calls in progress must have ended."""
        self._housekeeper.close()
        self.staging.close()
        with contextlib.suppress(OSError):
            self._usage.totals()

    def _delete(self, places: Sequence[Place]) -> None:
        failed: OSError | None = None
        for place in places:
            try:
                directory = self.tree.shard(place)
                if directory is not None:
                    discard(self._usage, directory, place)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _clear(self) -> int:
        remover = Remover(self.tree, self._usage)
        for shard in range(SHARDS):
            for entry in self.tree.entries(shard, [self._namespace.digest]):
                remover.remove(entry)
        self._usage.totals()
        return remover.stuck

    def _describe(self) -> dict[str, str]:
        totals = self._usage.totals()
        limits = self._limits
        return {
            "root": str(self.tree.root),
            "pages": f"{totals.pages}",
            "used": f"{totals.nbytes} of {limits.capacity} bytes",
            "free": f"{self._housekeeper.spare()} bytes of disk above the {limits.min_free} to leave free",
            "namespaces": f"{len(self.tree.namespaces())}",
            "evicted": f"{self._housekeeper.evicted_pages} pages by this process",
            "stuck": f"{self._housekeeper.stuck_pages} pages that cannot be removed",
            "refused": f"{self.writer.refused} pages not stored by this process",
        }


def _limits(tree: Tree, room: RoomSettings) -> Limits:
    disk = os.fstatvfs(tree.base.fd)
    capacity, min_free = (
        room_nbytes(given, disk.f_blocks * disk.f_frsize) for given in (room.capacity, room.min_free)
    )
    if capacity == 0:
        raise SettingsError("capacity: there is no room for any page")
    if disk.f_bavail * disk.f_frsize < min_free:
        logger.warning(
            "%s has %d bytes free, less than min_free: nothing is stored until there is more",
            tree.root,
            disk.f_bavail * disk.f_frsize,
        )
    return Limits(capacity, min_free, int(capacity * room.high_watermark), int(capacity * room.low_watermark))


@contextmanager
def _though_full() -> Iterator[None]:
    """A full disk is no reason not to open a store: it is read from."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
