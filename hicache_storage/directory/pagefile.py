"""The file of one page: opened to be read or to be made, and marked as used."""

from __future__ import annotations

import contextlib
import errno
import os
import time

from hicache_storage.directory.oserrors import NOT_A_PAGE
from hicache_storage.directory.tree import Directory
from hicache_storage.storage import Status

TOUCH_SECONDS = 1.0
"""A page used again within this time is not marked as used again: it saves writing the inode."""

# O_NONBLOCK: opening a FIFO that somebody planted must not wait for a writer
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def open_page(directory: Directory, name: str, flags: int = 0) -> int | Status:
    """A descriptor to read the page ``name`` by, or MISSING or CORRUPT. Raises OSError."""
    try:
        return os.open(name, _READ | flags, dir_fd=directory.fd)
    except FileNotFoundError:
        return Status.MISSING
    except OSError as error:
        if error.errno in NOT_A_PAGE:
            return Status.CORRUPT
        if error.errno == errno.EINVAL and flags & os.O_DIRECT:  # a directory, for one, cannot
            return open_page(directory, name, flags & ~os.O_DIRECT)
        raise


def create_page(directory: Directory, name: str, flags: int = 0) -> int:
    """A descriptor to write the new file ``name`` by, mode 0600 whatever the umask. Raises OSError."""
    fd = os.open(name, _CREATE | flags, 0o600, dir_fd=directory.fd)
    try:
        os.fchmod(fd, 0o600)
    except BaseException:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=directory.fd)
        raise
    return fd


def touch(fd: int, status: os.stat_result) -> None:
    """Mark a page as used now; ``status`` is what it was when it was opened."""
    if not 0 <= time.time() - status.st_mtime < TOUCH_SECONDS:
        with contextlib.suppress(OSError):  # read-only, or another user's: eviction knows less then
            os.utime(fd)
