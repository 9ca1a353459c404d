"""O_DIRECT: what it asks of memory, and whether a directory's disk can do it."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os

from hicache_storage.buffers import Page
from hicache_storage.directory.tree import Directory

ALIGNMENT = 4096
"""What O_DIRECT asks of addresses, offsets and sizes on any disk of today, in bytes."""


def is_aligned(page: Page) -> bool:
    """Whether O_DIRECT can take the page as it lies in memory."""
    return all(buffer.address % ALIGNMENT == 0 == buffer.nbytes % ALIGNMENT for buffer in page)


def direct_works(directory: Directory) -> bool:
    """Try O_DIRECT on this very directory: write a block, read it back. Raises OSError without room."""
    name = "direct-io-probe"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory.fd)
    try:
        with mmap.mmap(-1, ALIGNMENT) as block:
            fd = os.open(
                name,
                os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT | os.O_CLOEXEC,
                0o600,
                dir_fd=directory.fd,
            )
            try:
                return os.pwritev(fd, [block], 0) == os.preadv(fd, [block], 0) == ALIGNMENT
            finally:
                os.close(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory.fd)
