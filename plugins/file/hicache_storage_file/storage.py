"""The file backend: pages as files, moved by several threads, bounded in room and in time.

Beside its directory it costs a few threads, and 2 MiB for each reading thread once it has to wait
for the disk.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.buffers import Page, page_nbytes, views
from hicache_storage.directory.bounded import in_time
from hicache_storage.directory.direct import ALIGNMENT, is_aligned
from hicache_storage.directory.oserrors import NO_DESCRIPTORS, translate
from hicache_storage.directory.pages import PageDirectory
from hicache_storage.directory.tree import Place
from hicache_storage.directory.writer import Object
from hicache_storage.errors import ClosedError, CorruptError, SettingsError
from hicache_storage.namespace import Namespace
from hicache_storage.page_hook import page_work
from hicache_storage.storage import Capabilities, HiCacheStorage, Status, check_batch
from hicache_storage_file.pageio import Direct, PageIO, is_in_memory
from hicache_storage_file.settings import FileSettings
from hicache_storage_file.writer import PageWriter

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
        value = in_time(store.lookups, lambda: store.read(place))
        if value is Status.CORRUPT:
            raise CorruptError(f"what is stored under {key} is no page")
        return value if isinstance(value, bytearray) else None

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        store = self._store()
        piece = memoryview(value).cast("B")
        item = Object(store.tree.locate(key), piece.nbytes)
        error = store.writer.write([item], [[piece]], [False], lambda _: None)[0]
        if error is not None:
            raise error

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._store().directory.present(keys)

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
        objects = [
            Object(store.tree.locate(key), page_nbytes(page)) for key, page in zip(keys, pages, strict=True)
        ]
        outcomes = store.writer.write(
            objects, [views(page) for page in pages], [is_aligned(page) for page in pages], page_work()
        )
        return [Status.OK if error is None else Status.of(error) for error in outcomes]

    def delete(self, keys: Sequence[str]) -> None:
        self._store().directory.delete(keys)

    def clear(self) -> None:
        """Remove every page of this storage's own namespace; directories stay.

        Pages that another process stores meanwhile may stay. Raises UnavailableError, having
        removed all others, when pages cannot be removed.
        """
        self._store().directory.clear()

    def describe(self) -> dict[str, str]:
        store = self._store()
        return {**store.directory.describe(), "direct_io": store.direct_io}

    def close(self) -> None:
        """End the threads and let go of the directory. Calls in progress end first."""
        store, self._opened = self._opened, None
        if store is not None and store.directory.pid == os.getpid():
            store.close()

    def _store(self) -> _Store:
        store = self._opened
        if store is None:
            raise ClosedError("the storage is closed")
        if store.directory.pid != os.getpid():
            raise ClosedError("the storage was opened before this process was forked; open one here")
        return store


class _Store:
    """Everything that is there from opening to closing."""

    def __init__(self, settings: FileSettings, namespace: Namespace) -> None:
        # a pool for each of SGLang's threads, so that lookups and reads never wait for writes
        self.lookups = BatchPool(2, "hicache-file-lookup")
        with ExitStack() as undo:
            undo.callback(self.lookups.close)
            self.directory = PageDirectory(settings.root, settings, namespace, self.lookups)
            undo.callback(self.directory.close)
            direct, reason = _find_direct(settings, self.directory)
            undo.pop_all()
        self.tree = self.directory.tree
        self.direct_io = f"{direct}: {reason}"
        self._pageio = PageIO(direct, is_in_memory(self.tree.base))
        self.readers = BatchPool(settings.threads, "hicache-file-read")
        self._writers = BatchPool(settings.threads, "hicache-file-write")
        self.writer = PageWriter(self.directory.writer, self._pageio, self._writers)

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

    def close(self) -> None:
        for pool in (self.lookups, self.readers, self._writers):
            pool.close()
        self.directory.close()


def _find_direct(settings: FileSettings, directory: PageDirectory) -> tuple[Direct, str]:
    """How to use O_DIRECT, and why."""
    if settings.direct_io == "off":
        return "never", "switched off"
    if directory.can_direct():
        return ("always", "asked for") if settings.direct_io == "on" else ("cold reads", "the disk can")
    if settings.direct_io == "on":
        raise SettingsError(f"direct_io: the file system of {settings.root} cannot do O_DIRECT")
    logger.warning("%s cannot do O_DIRECT: all reads and writes go through the page cache", settings.root)
    return "never", "the file system cannot"
