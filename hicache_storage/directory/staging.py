"""Where pages are written before they get their name: one directory a process.

A page is written here under a temporary name and published by a rename, so a reader sees all of
it or nothing. Nothing is synced to the disk: after a power loss a page may be torn, which its
header's checksum finds, and a cache may always forget. A process holds the lock of its directory
while it lives; directories whose lock is free belonged to writers that died, and are removed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import threading
from collections.abc import Callable

from hicache_storage.directory.locks import locked, open_lock, try_lock, unlock
from hicache_storage.directory.tree import Directory, Handle, Tree
from hicache_storage.errors import ClosedError

TMP = "tmp"
LOCK = "lock"


class Staging:
    """The directory of one process for pages in the making. Thread-safe."""

    def __init__(self, tree: Tree, alone: Callable[[], None] | None = None) -> None:
        """``alone`` is called when no other writer is alive, while none can come to life."""
        self._tree = tree
        self._alone = alone
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._name = ""
        self._directory: Directory | None = None
        self._held: Handle | None = None
        self._closed = False

    def directory(self) -> Directory:
        """The directory to write in, made on first use. Raises OSError when that is impossible."""
        found = self._directory
        return found if found is not None else self._claim()

    def new_name(self) -> str:
        """A name that no other page in the making has."""
        return f"{next(self._numbers):x}"

    def reap(self) -> None:
        """Remove what writers that died have left behind. Raises OSError."""
        bookkeeping = self._tree.bookkeeping()
        with locked(open_lock(bookkeeping, "tmp.lock")):
            self._reap(bookkeeping)

    def forget_removed(self) -> None:
        """Make a new directory for the next page if somebody removed ours."""
        with self._lock:
            if self._directory is not None and self._directory.removed:
                self._directory = self._held = None

    def close(self) -> None:
        """Remove the directory, with pages that threads stuck in the store are still writing."""
        with self._lock:
            self._closed = True
            if self._directory is None or self._held is None:
                return
            unlock(self._held)
            self._directory = self._held = None
        with contextlib.suppress(OSError):  # the next one to open the store does it
            _remove(self._tree.bookkeeping(), self._name)

    def _claim(self) -> Directory:
        with self._lock:
            if self._closed:
                raise ClosedError("the storage is closed")
            if self._directory is not None:
                return self._directory
            bookkeeping = self._tree.bookkeeping()
            self._name = name = f"{os.getpid()}-{secrets.token_hex(8)}"
            # under this lock, so that nobody takes a directory whose lock is not held yet for a dead one's
            with locked(open_lock(bookkeeping, "tmp.lock")):
                above = bookkeeping.directory(TMP, create=True)
                assert above is not None
                directory = above.directory(name, create=True)
                assert directory is not None
                try:
                    held = open_lock(directory, LOCK)
                    if not try_lock(held):
                        raise OSError(errno.EIO, "a lock that nobody can know is taken")
                    if self._reap(bookkeeping) and self._alone is not None:
                        self._alone()
                    self._alone = None  # from here on there may be reservations of our own
                except OSError:
                    _remove(bookkeeping, name)
                    raise
            self._held, self._directory = held, directory
            return directory

    def _reap(self, bookkeeping: Directory) -> bool:
        """Remove what dead writers left; whether no other writer is alive. Holds the lock of all."""
        alone = True
        above = bookkeeping.directory(TMP)
        for name in above.names() if above is not None else []:
            directory = above.directory(name) if above is not None else None
            if directory is None or name == self._name:
                continue
            try:
                lock = directory.open(LOCK, os.O_RDWR)
                dead = try_lock(lock)
            except FileNotFoundError:
                dead = True
            else:
                if dead:
                    unlock(lock)  # who could take it needs the lock that we hold
            if dead:
                _remove(bookkeeping, name)
            alone &= dead
        return alone


def _remove(bookkeeping: Directory, name: str) -> None:
    above = bookkeeping.directory(TMP)
    directory = above.directory(name) if above is not None else None
    if above is None or directory is None:
        return
    with contextlib.suppress(FileNotFoundError):  # its owner, who is closing, removes it at the same time
        for page in directory.names():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(page, dir_fd=directory.fd)
        os.rmdir(name, dir_fd=above.fd)
