"""Pages as files that NIXL reads and writes: in the same directory as the file backend's.

Files are opened, created, published and removed by the directory's own mechanism; NIXL gets open
descriptors. So a page is whole from the moment it has its name, a missing or short one is known
before anything is transferred, and nothing planted in the tree leads out of it.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Sequence
from contextlib import ExitStack

from hicache_storage import (
    Buffer,
    Capabilities,
    CorruptError,
    DeadlineError,
    Namespace,
    Page,
    SettingsError,
    Status,
    UnavailableError,
)
from hicache_storage.batch_pool import BatchPool
from hicache_storage.directory.bounded import in_time
from hicache_storage.directory.direct import ALIGNMENT
from hicache_storage.directory.oserrors import translate
from hicache_storage.directory.pagefile import open_page
from hicache_storage.directory.pages import PageDirectory
from hicache_storage.directory.tree import Place
from hicache_storage_nixl.access import Access
from hicache_storage_nixl.reading import Reading
from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.slots import SlotMemory
from hicache_storage_nixl.streams import Streams
from hicache_storage_nixl.transfers import Transfers
from hicache_storage_nixl.writing import Writing

logger = logging.getLogger(__name__)


class Files:
    """Thread-safe. Calls end by their deadline."""

    capabilities = Capabilities(
        bounded=True,
        page_hook=True,
        persistent=True,
        shared=True,
        delete=True,
        clear=True,
        evicts=True,
        alignment=ALIGNMENT,
    )

    def __init__(self, settings: NixlSettings, namespace: Namespace, transfers: Transfers) -> None:
        """Raises SettingsError for settings that this disk cannot honour, StorageError otherwise."""
        if settings.root is None:
            raise SettingsError("root: the directory for the pages is not set")
        with ExitStack() as undo:
            self._lookups = BatchPool(2, "hicache-nixl-lookup")
            undo.callback(self._lookups.close)
            try:
                directory = PageDirectory(settings.root, settings, namespace, self._lookups)
                undo.callback(directory.close)
                direct, self._direct_reason = _find_direct(settings, directory)
            except OSError as error:
                raise translate(error) from error
            undo.pop_all()
        self._directory = directory
        self._access = Access(directory, transfers, direct)
        self._memory = SlotMemory(transfers, settings.in_flight // settings.threads)
        self._readers = Streams("hicache-nixl-read", settings.threads, self._memory)
        self._writers = Streams("hicache-nixl-write", settings.threads, self._memory)

    def get(self, key: str) -> bytearray | None:
        place = self._directory.tree.locate(key)
        found = in_time(self._lookups, lambda: self._nbytes(place))
        if isinstance(found, Status):
            value, status = None, found
        else:
            value = bytearray(found)
            status = self._read([key], [(Buffer.of(value),)], direct=False)[0]
        if status is Status.CORRUPT:
            raise CorruptError(f"what is stored under {key} is no page")
        if status is Status.TIMED_OUT:
            raise DeadlineError(f"{key} was not read in time")
        if status is Status.FAILED:
            raise UnavailableError(f"{key} cannot be read")
        return value if status else None

    def set(self, key: str, value: memoryview) -> None:
        content = bytearray(value)
        writing = Writing(self._access, [key], [(Buffer.of(content),)])
        error = writing.run(self._writers, direct=False)[0]
        if error is not None:
            raise error

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._directory.present(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._read(keys, pages, direct=True)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        outcomes = Writing(self._access, keys, pages).run(self._writers, direct=True)
        return [Status.OK if error is None else Status.of(error) for error in outcomes]

    def delete(self, keys: Sequence[str]) -> None:
        self._directory.delete(keys)

    def clear(self) -> None:
        self._directory.clear()

    def describe(self) -> dict[str, str]:
        return {**self._directory.describe(), "direct_io": self._direct_reason}

    def close(self) -> None:
        for pool in (self._lookups, self._readers, self._writers):
            pool.close()
        self._memory.close()
        self._directory.close()

    def _read(self, keys: Sequence[str], pages: Sequence[Page], direct: bool) -> list[Status]:
        return Reading(self._access, keys, pages).run(self._readers, direct=direct)

    def _nbytes(self, place: Place) -> int | Status:
        """Size of the page that stands there. Raises OSError."""
        directory = self._directory.tree.shard(place)
        fd = open_page(directory, place.name) if directory is not None else Status.MISSING
        if isinstance(fd, Status):
            return fd
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return status.st_size if stat.S_ISREG(status.st_mode) else Status.CORRUPT


def _find_direct(settings: NixlSettings, directory: PageDirectory) -> tuple[bool, str]:
    """Whether to use O_DIRECT, and why."""
    if settings.direct_io == "off":
        return False, "never: switched off"
    if directory.can_direct():
        return True, "for aligned pages: the disk can"
    if settings.direct_io == "on":
        raise SettingsError(f"direct_io: the file system of {settings.root} cannot do O_DIRECT")
    logger.warning("%s cannot do O_DIRECT: all reads and writes go through the page cache", settings.root)
    return False, "never: the file system cannot"
