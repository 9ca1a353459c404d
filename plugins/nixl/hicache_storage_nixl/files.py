"""Pages as files that NIXL reads and writes: in the same directory as the file backend's.

Files are opened, created, published and removed by the directory's own mechanism; NIXL gets open
descriptors. So a page is whole from the moment it has its name, a missing or short one is known
before anything is transferred, and nothing planted in the tree leads out of it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import resource
import stat
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from hicache_storage import (
    Buffer,
    Capabilities,
    CorruptError,
    Namespace,
    Page,
    RequestError,
    SettingsError,
    Status,
    StorageError,
    UnavailableError,
    page_nbytes,
)
from hicache_storage.directory.direct import ALIGNMENT, is_aligned
from hicache_storage.directory.oserrors import NO_DESCRIPTORS, translate
from hicache_storage.directory.pagefile import create_page, open_page, touch
from hicache_storage.directory.pages import PageDirectory
from hicache_storage.directory.tree import Directory, Place
from hicache_storage.directory.writer import Object, Outcome
from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.transfers import Move, Operation, Transfers

logger = logging.getLogger(__name__)

MAX_FILES = 256
"""Files open for one transfer; fewer where the process may not have so many."""


@dataclass(frozen=True, slots=True)
class _File:
    """One page of a batch, its file open."""

    number: int
    page: Page
    nbytes: int
    fd: int
    status: os.stat_result | None = None
    staging: Directory | None = None
    name: str = ""

    @property
    def move(self) -> Move:
        memory = [buffer for buffer in self.page if buffer.nbytes]
        return Move(memory, self.nbytes, (self.fd, ""))


class Files:
    """Thread-safe. Calls take as long as the file system takes."""

    capabilities = Capabilities(
        zero_copy=True,
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
        self._transfers = transfers
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_files = max(1, min(MAX_FILES, soft // 8))
        try:
            self._directory = PageDirectory(settings.root, settings, namespace)
            try:
                self._direct, self._direct_reason = _find_direct(settings, self._directory)
            except BaseException:
                self._directory.close()
                raise
        except OSError as error:
            raise translate(error) from error
        self._tree = self._directory.tree

    def get(self, key: str) -> bytearray | None:
        try:
            nbytes = self._nbytes(self._tree.locate(key))
        except OSError as error:
            raise translate(error) from error
        status = nbytes if isinstance(nbytes, Status) else Status.OK
        value = None
        if isinstance(nbytes, int):
            with self._scratch(nbytes) as memory:
                status = self.batch_get_into([key], [(memory,)])[0]
                value = bytearray(memory.view) if status else None
        if status is Status.CORRUPT:
            raise CorruptError(f"what is stored under {key} is no page")
        if value is None and status is not Status.MISSING:
            raise UnavailableError(f"{key} cannot be read")
        return value

    def set(self, key: str, value: memoryview) -> None:
        content = memoryview(value).cast("B")
        with self._scratch(content.nbytes) as memory:
            memory.view[:] = content
            error = self._write([key], [(memory,)])[0]
        if error is not None:
            raise error

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._directory.present(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        places = [self._tree.locate(key) for key in keys]
        statuses = [Status.FAILED] * len(keys)

        def open_one(i: int) -> _File | None:
            found = self._open(places[i], i, pages[i])
            if isinstance(found, Status):
                statuses[i] = found
                return None
            return found

        def failed(i: int, error: StorageError) -> None:
            logger.warning("%s is not read: %s", keys[i], error)

        todo = deque(range(len(keys)))
        while todo:
            with self._opened(todo, pages, open_one, failed) as files:
                for file, error in zip(files, self._moved("READ", files), strict=True):
                    statuses[file.number] = _read_status(file, error)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return [Status.OK if error is None else Status.of(error) for error in self._write(keys, pages)]

    def delete(self, keys: Sequence[str]) -> None:
        self._directory.delete(keys)

    def clear(self) -> None:
        self._directory.clear()

    def describe(self) -> dict[str, str]:
        return {**self._directory.describe(), "direct_io": self._direct_reason}

    def close(self) -> None:
        self._directory.close()

    def _write(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Outcome]:
        """Raises RequestError."""
        writer = self._directory.writer
        objects = [
            Object(self._tree.locate(key), page_nbytes(page)) for key, page in zip(keys, pages, strict=True)
        ]

        def fill(numbers: Sequence[int]) -> list[Outcome]:
            outcomes: dict[int, Outcome] = dict.fromkeys(numbers)

            def failed(i: int, error: StorageError) -> None:
                writer.release([objects[i]])
                outcomes[i] = error

            todo = deque(numbers)
            while todo:
                with self._opened(todo, pages, lambda i: self._create(i, pages[i]), failed) as files:
                    for file, error in zip(files, self._moved("WRITE", files), strict=True):
                        try:
                            self._publish(objects[file.number], file, error)
                        except StorageError as reason:
                            failed(file.number, reason)
            return list(outcomes.values())

        outcomes = writer.write(objects, fill)
        for error in outcomes:
            if isinstance(error, RequestError):
                raise error
        return outcomes

    def _publish(self, item: Object, file: _File, error: StorageError | None) -> None:
        """Give a file that was written its place; else remove it and raise StorageError."""
        writer, staging = self._directory.writer, file.staging
        assert staging is not None
        try:
            if error is not None:
                # NIXL says that it failed, the file system says why
                writer.attempt(item.nbytes, lambda: os.posix_fallocate(file.fd, 0, max(1, item.nbytes)))
                raise error
            writer.attempt(item.nbytes, lambda: writer.publish(item, staging, file.name))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(file.name, dir_fd=staging.fd)
            raise

    def _moved(self, operation: Operation, files: Sequence[_File]) -> list[StorageError | None]:
        """Why each of the pages did not arrive; None for those that did. Raises RequestError for reads."""
        moving = [file for file in files if file.nbytes]
        try:
            arrived = iter(self._transfers.run(operation, [file.move for file in moving]))
        except StorageError as error:
            if operation == "READ" and isinstance(error, RequestError):
                raise
            return [error if file.nbytes else None for file in files]
        failure = UnavailableError("NIXL reports an error of the transfer")
        return [None if not file.nbytes or next(arrived) else failure for file in files]

    @contextmanager
    def _opened(
        self,
        todo: deque[int],
        pages: Sequence[Page],
        step: Callable[[int], _File | None],
        failed: Callable[[int, StorageError], None],
    ) -> Iterator[list[_File]]:
        """The next files of a batch, as many as may be open at a time; they are closed afterwards.

        ``step`` opens one, or None where there is nothing to open. Takes from ``todo`` what is dealt with.
        """
        files: list[_File] = []
        descriptors = 0
        try:
            while todo and len(files) < self._max_files:
                i = todo[0]
                descriptors += len(pages[i])
                if files and descriptors > self._transfers.max_descriptors:
                    break
                try:
                    file = self._step(partial(step, i), page_nbytes(pages[i]), alone=not files)
                except StorageError as error:
                    failed(i, error)
                except OSError:
                    break
                else:
                    if file is not None:
                        files.append(file)
                todo.popleft()
            yield files
        finally:
            for file in files:
                os.close(file.fd)

    def _step(self, step: Callable[[], _File | None], nbytes: int, alone: bool) -> _File | None:
        """Raises StorageError, or OSError when there are no descriptors but those of files before it."""
        try:
            return step()
        except OSError as error:
            if error.errno in NO_DESCRIPTORS and not alone:
                raise
            return self._directory.writer.attempt(nbytes, step)

    def _open(self, place: Place, number: int, page: Page) -> _File | Status:
        """Raises OSError."""
        directory = self._tree.shard(place)
        if directory is None:
            return Status.MISSING
        fd = open_page(directory, place.name, self._flags(page))
        if isinstance(fd, Status):
            return fd
        try:
            status, nbytes = os.fstat(fd), page_nbytes(page)
            if status.st_size == nbytes and stat.S_ISREG(status.st_mode):
                return _File(number, page, nbytes, fd, status)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return Status.CORRUPT

    def _create(self, number: int, page: Page) -> _File:
        """Raises OSError."""
        staging = self._directory.staging.directory()
        name = self._directory.staging.new_name()
        fd = create_page(staging, name, self._flags(page))
        return _File(number, page, page_nbytes(page), fd, None, staging, name)

    def _flags(self, page: Page) -> int:
        return os.O_DIRECT if self._direct and is_aligned(page) else 0

    def _nbytes(self, place: Place) -> int | Status:
        """Size of the page that stands there. Raises OSError."""
        directory = self._tree.shard(place)
        fd = open_page(directory, place.name) if directory is not None else Status.MISSING
        if isinstance(fd, Status):
            return fd
        try:
            status = os.fstat(fd)
        finally:
            os.close(fd)
        return status.st_size if stat.S_ISREG(status.st_mode) else Status.CORRUPT

    @contextmanager
    def _scratch(self, nbytes: int) -> Iterator[Buffer]:
        """Registered memory for one object that the caller has in memory of any kind."""
        memory = Buffer.of(mmap.mmap(-1, nbytes) if nbytes else bytearray())
        self._transfers.register(memory)
        try:
            yield memory
        finally:
            self._transfers.unregister(memory)


def _read_status(file: _File, error: StorageError | None) -> Status:
    assert file.status is not None
    if error is None:
        touch(file.fd, file.status)
        return Status.OK
    with contextlib.suppress(OSError):
        if os.fstat(file.fd).st_size != file.nbytes:  # truncated since it was opened
            return Status.CORRUPT
    return Status.FAILED


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
