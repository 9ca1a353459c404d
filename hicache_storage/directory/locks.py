"""Locks between processes: flock on small files, which the kernel drops when their holder dies.

They work between containers that share a directory, where process ids mean nothing, and over NFS
on Linux (flock(2)). A lock belongs to its descriptor, so two storages in one process exclude each
other like two processes do.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_storage.directory.tree import Directory, Handle


def open_lock(directory: Directory, name: str) -> Handle:
    """The lock file ``name`` in ``directory``, created when missing; not locked yet."""
    return directory.open(name, os.O_RDWR | os.O_CREAT)


def try_lock(handle: Handle) -> bool:
    """Take the lock if nobody holds it; then ``unlock`` it, or lose it with the process.

    Do not count on the handle going away: a logged exception keeps the frames that it went through.
    """
    try:
        fcntl.flock(handle.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(handle: Handle) -> None:
    """Let go of the lock."""
    fcntl.flock(handle.fd, fcntl.LOCK_UN)


@contextmanager
def locked(handle: Handle) -> Iterator[None]:
    """Hold the lock inside, waiting for it as long as it takes."""
    fcntl.flock(handle.fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        unlock(handle)
