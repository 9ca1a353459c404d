"""What an errno of the file system means to the caller of a storage."""

from __future__ import annotations

import errno

from hicache_storage.errors import AccessDeniedError, CapacityError, StorageError, UnavailableError

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""EFBIG is the process's own limit (RLIMIT_FSIZE, ``ulimit -f``)."""

FREEABLE = NO_ROOM - {errno.EFBIG}
"""Removing pages helps."""

DENIED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})

NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})

NOT_A_PAGE = frozenset({errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO})
"""Something other than a regular file stands where a page should: a symlink, a directory, a socket."""


def translate(error: OSError) -> StorageError:
    """The StorageError to raise instead; the OSError should be its cause."""
    if error.errno in NO_ROOM:
        return CapacityError(f"the disk has no room: {error}")
    if error.errno in DENIED:
        return AccessDeniedError(f"the file system refuses: {error}")
    return UnavailableError(f"the file system fails: {error}")
