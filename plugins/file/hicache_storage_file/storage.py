"""The file backend: pages as files, moved by several threads, bounded in room and in time.

Opening it costs a few threads, at most 256 directory descriptors a namespace, and 1 MiB for each
reading thread once it has to wait for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from functools import partial

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.buffers import Page, page_nbytes, views
from hicache_storage.errors import ClosedError, CorruptError, SettingsError, UnavailableError
from hicache_storage.namespace import Namespace
from hicache_storage.page_hook import page_work
from hicache_storage.storage import Capabilities, HiCacheStorage, Status, check_batch
from hicache_storage_file.bounded import in_time
from hicache_storage_file.evict import Remover
from hicache_storage_file.housekeeper import Housekeeper, Limits
from hicache_storage_file.oserrors import NO_DESCRIPTORS, NO_ROOM, translate
from hicache_storage_file.pageio import ALIGNMENT, Direct, PageIO, direct_works, is_aligned, is_in_memory
from hicache_storage_file.settings import FileSettings, room_nbytes
from hicache_storage_file.staging import Staging
from hicache_storage_file.tree import SHARDS, Place, Tree
from hicache_storage_file.usage import Usage, discard
from hicache_storage_file.writer import Object, Writer

logger = logging.getLogger(__name__)


class FileStorage(HiCacheStorage):
    """Pages under ``settings.root``, shared with every process that opens the same directory.

    Thread-safe. It is of no use in a child that was forked after it was opened: calls there raise
    ClosedError, and the child opens its own.
    """

    Settings = FileSettings
    capabilities = Capabilities(
        zero_copy=True,
        bounded=True,
        page_hook=True,
        persistent=True,
        shared=True,
        delete=True,
        clear=True,
        evicts=True,
        alignment=ALIGNMENT,
    )

    def __init__(self, settings: FileSettings, namespace: Namespace) -> None:
        """Raises SettingsError for settings that this disk cannot honour, or StorageError."""
        super().__init__(settings, namespace)
        try:
            self._opened: _Store | None = _Store(settings, namespace)
        except OSError as error:
            raise translate(error) from error

    def get(self, key: str) -> bytearray | None:
        store = self._store()
        place = store.tree.locate(key)
        value = in_time(store.readers, lambda: store.read(place))
        if value is Status.CORRUPT:
            raise CorruptError(f"what is stored under {key} is no page")
        return value if isinstance(value, bytearray) else None

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        store = self._store()
        place = store.tree.locate(key)
        piece = memoryview(value).cast("B")
        error = store.writer.write([Object(place, [piece], piece.nbytes, aligned=False)])[0]
        if error is not None:
            raise error

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        store = self._store()
        return in_time(store.lookups, lambda: store.tree.present(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        store = self._store()
        places = [store.tree.locate(key) for key in keys]
        arrived = page_work()

        def read(i: int, lease: Lease) -> Status:
            status = store.read_into(places[i], pages[i], lease)
            if status:
                with lease.held():
                    arrived(i)
            return status

        return store.readers.run(len(keys), read)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        store = self._store()
        leaving = page_work()
        objects = [
            Object(
                store.tree.locate(key), views(page), page_nbytes(page), is_aligned(page), partial(leaving, i)
            )
            for i, (key, page) in enumerate(zip(keys, pages, strict=True))
        ]
        return [Status.OK if error is None else Status.of(error) for error in store.writer.write(objects)]

    def delete(self, keys: Sequence[str]) -> None:
        store = self._store()
        places = [store.tree.locate(key) for key in keys]
        in_time(store.lookups, lambda: store.delete(places))

    def clear(self) -> None:
        """Remove every page of this storage's own namespace; directories stay.

        Pages that another process stores meanwhile may stay. Raises UnavailableError, having
        removed all others, when pages cannot be removed.
        """
        store = self._store()
        stuck = in_time(store.lookups, lambda: store.clear(self.namespace.digest))
        if stuck:
            raise UnavailableError(f"{stuck} pages cannot be removed")

    def describe(self) -> dict[str, str]:
        store = self._store()
        return in_time(store.lookups, store.describe)

    def close(self) -> None:
        """End the threads and let go of the directory. Calls in progress end first."""
        store, self._opened = self._opened, None
        if store is not None and store.pid == os.getpid():
            store.close()

    def _store(self) -> _Store:
        store = self._opened
        if store is None:
            raise ClosedError("the storage is closed")
        if store.pid != os.getpid():
            raise ClosedError("the storage was opened before this process was forked; open one here")
        return store


class _Store:
    """Everything that is there from opening to closing; descriptors end with the last reference."""

    def __init__(self, settings: FileSettings, namespace: Namespace) -> None:
        self.pid = os.getpid()
        self.tree = Tree(settings.root.expanduser())
        self._limits = self._find_limits(settings)
        self._usage = Usage(self.tree)
        self._staging = Staging(self.tree, self._usage.abandon_reservations)
        self._direct, self._direct_reason = self._find_direct(settings)
        self._pageio = PageIO(self._direct, is_in_memory(self.tree.base))
        try:
            self.tree.introduce(namespace)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        if not self._usage.known():
            self._usage.recount()
        self._housekeeper = Housekeeper(self.tree, self._usage, self._staging, self._limits)
        # a pool for each of SGLang's threads, so that lookups and reads never wait for writes
        self.lookups = BatchPool(2, "hicache-file-lookup")
        self.readers = BatchPool(settings.threads, "hicache-file-read")
        self._writers = BatchPool(settings.threads, "hicache-file-write")
        self.writer = Writer(
            self.tree,
            self._usage,
            self._staging,
            self._pageio,
            self._housekeeper,
            self._limits,
            self.lookups,
            self._writers,
        )

    def read_into(self, place: Place, page: Page, lease: Lease) -> Status:
        """Raises StorageError."""
        try:
            directory = self.tree.shard(place)
            if directory is None:
                return Status.MISSING
            return self._pageio.read_into(directory, place.name, page, lease)
        except OSError as error:
            if error.errno in NO_DESCRIPTORS:
                self.tree.shed()
            raise translate(error) from error

    def read(self, place: Place) -> bytearray | Status:
        """Raises OSError."""
        directory = self.tree.shard(place)
        return Status.MISSING if directory is None else self._pageio.read(directory, place.name)

    def delete(self, places: Sequence[Place]) -> None:
        """Remove all that can be removed, then raise the first OSError there was."""
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

    def clear(self, namespace: str) -> int:
        """Returns how many pages could not be removed."""
        remover = Remover(self.tree, self._usage)
        for shard in range(SHARDS):
            for entry in self.tree.entries(shard, [namespace]):
                remover.remove(entry)
        self._usage.totals()
        return remover.stuck

    def describe(self) -> dict[str, str]:
        totals = self._usage.totals()
        limits = self._limits
        return {
            "root": str(self.tree.root),
            "pages": f"{totals.pages}",
            "used": f"{totals.nbytes} of {limits.capacity} bytes",
            "free": f"{self._housekeeper.spare()} bytes of disk above the {limits.min_free} to leave free",
            "namespaces": f"{len(self.tree.namespaces())}",
            "direct_io": f"{self._direct}: {self._direct_reason}",
            "evicted": f"{self._housekeeper.evicted_pages} pages by this process",
            "stuck": f"{self._housekeeper.stuck_pages} pages that cannot be removed",
            "refused": f"{self.writer.refused} pages not stored by this process",
        }

    def close(self) -> None:
        self._housekeeper.close()
        for pool in (self.lookups, self.readers, self._writers):
            pool.close()
        self._staging.close()
        with contextlib.suppress(OSError):
            self._usage.totals()

    def _find_limits(self, settings: FileSettings) -> Limits:
        disk = os.fstatvfs(self.tree.base.fd)
        capacity, min_free = (
            room_nbytes(room, disk.f_blocks * disk.f_frsize)
            for room in (settings.capacity, settings.min_free)
        )
        if capacity == 0:
            raise SettingsError("capacity: there is no room for any page")
        if disk.f_bavail * disk.f_frsize < min_free:
            logger.warning(
                "%s has %d bytes free, less than min_free: nothing is stored until there is more",
                settings.root,
                disk.f_bavail * disk.f_frsize,
            )
        high, low = int(capacity * settings.high_watermark), int(capacity * settings.low_watermark)
        return Limits(capacity, min_free, high, low)

    def _find_direct(self, settings: FileSettings) -> tuple[Direct, str]:
        """How to use O_DIRECT, and why. Makes the directory for pages in the making, to try it there."""
        works = False
        try:
            directory = self._staging.directory()
            works = settings.direct_io != "off" and direct_works(directory)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
        if settings.direct_io == "off":
            return "never", "switched off"
        if works:
            return ("always", "asked for") if settings.direct_io == "on" else ("cold reads", "the disk can")
        if settings.direct_io == "on":
            raise SettingsError(f"direct_io: the file system of {settings.root} cannot do O_DIRECT")
        logger.warning("%s cannot do O_DIRECT: all reads and writes go through the page cache", settings.root)
        return "never", "the file system cannot"
