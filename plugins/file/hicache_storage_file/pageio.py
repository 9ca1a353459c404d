"""Moves one page between a file and memory, in as few system calls as it takes.

A page is read in two steps. What the page cache holds goes straight into the caller's memory with
RWF_NOWAIT, which the kernel answers without waiting for the disk (preadv2(2)), so it can be done
under the page's lease. The rest is read, waiting, into memory of the reading thread, and copied
from there under the lease: a read that hangs past its deadline never points at the caller's memory.
All of it, copies included, runs without the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Buffer, Page, page_nbytes, views
from hicache_storage.directory.direct import ALIGNMENT
from hicache_storage.directory.pagefile import create_page, open_page, touch
from hicache_storage.directory.tree import Directory
from hicache_storage.storage import Status

BOUNCE_NBYTES = 2 << 20
"""Memory a thread keeps for reads that must wait for the disk: one huge page, which O_DIRECT reads twice
as fast into as into small ones."""

_IOV_MAX = os.sysconf("SC_IOV_MAX")

Direct = Literal["never", "cold reads", "always"]


class PageIO:
    """Reads and writes pages of one file system. Thread-safe."""

    def __init__(self, direct: Direct, in_memory: bool) -> None:
        """``in_memory``: the file system is memory itself, so reading never waits for a disk."""
        self._direct = direct
        self._in_memory = in_memory
        self._can_ask = True  # RWF_NOWAIT; some file systems do not have it
        self._mine = threading.local()

    def read_into(self, directory: Directory, name: str, page: Page, lease: Lease) -> Status:
        """Fill the page from the file ``name``, which must have exactly its size.

        Raises OSError, or DeadlineError once the lease is withdrawn.
        """
        fd = open_page(directory, name, os.O_DIRECT if self._direct == "always" else 0)
        if isinstance(fd, Status):
            return fd
        try:
            status = os.fstat(fd)
            nbytes = page_nbytes(page)
            if status.st_size != nbytes or not stat.S_ISREG(status.st_mode):
                return Status.CORRUPT
            done = 0 if self._direct == "always" else self._read_cached(fd, views(page), nbytes, lease)
            if done < nbytes and not self._read_waiting(fd, page, done, nbytes, lease):
                return Status.CORRUPT
            touch(fd, status)
            return Status.OK
        finally:
            os.close(fd)

    def read(self, directory: Directory, name: str) -> bytearray | Status:
        """The whole file in new memory, or MISSING or CORRUPT. Raises OSError."""
        fd = open_page(directory, name)
        if isinstance(fd, Status):
            return fd
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return Status.CORRUPT
            value = bytearray(status.st_size)
            done = 0
            while done < len(value):
                got = os.preadv(fd, [memoryview(value)[done:]], done)
                if got == 0:
                    return Status.CORRUPT
                done += got
            touch(fd, status)
            return value
        finally:
            os.close(fd)

    def write(self, pieces: Sequence[memoryview], aligned: bool, directory: Directory, name: str) -> None:
        """Create the file ``name`` out of the pieces; what there is of it stays when that fails.

        ``aligned``: addresses and sizes of all pieces are multiples of ALIGNMENT. Raises OSError.
        """
        direct = aligned and self._direct == "always"
        fd = create_page(directory, name, os.O_DIRECT if direct else 0)
        try:
            _write_all(fd, pieces, direct)
        finally:
            os.close(fd)

    def _read_cached(self, fd: int, pieces: list[memoryview], nbytes: int, lease: Lease) -> int:
        """Read from the start on what is there without waiting; returns how much that was."""
        done = 0
        while done < nbytes:
            ahead = _after(pieces, done)
            try:
                with lease.held():
                    if self._in_memory:
                        got = os.preadv(fd, ahead, done)
                    elif self._can_ask:
                        got = os.preadv(fd, ahead, done, os.RWF_NOWAIT)
                    else:
                        got = 0
            except BlockingIOError:
                break
            except OSError as error:
                if error.errno != errno.EOPNOTSUPP:
                    raise
                self._can_ask = False
                break
            if got == 0:
                break
            done += got
        return done

    def _read_waiting(self, fd: int, page: Page, done: int, nbytes: int, lease: Lease) -> bool:
        """Read the rest by way of this thread's own memory; False when the file ends early."""
        if self._direct == "cold reads":
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        elif self._direct == "never":
            with contextlib.suppress(OSError):
                os.posix_fadvise(fd, done, nbytes - done, os.POSIX_FADV_WILLNEED)
        bounce = self._bounce()
        while done < nbytes:
            start = done - done % ALIGNMENT
            got = min(os.preadv(fd, [bounce.view], start), nbytes - start)
            if start + got <= done:
                return False
            with lease.held():
                _copy_out(bounce.slice(done - start, start + got - done), page, done)
            done = start + got
        return True

    def _bounce(self) -> Buffer:
        mine: Buffer | None = getattr(self._mine, "bounce", None)
        if mine is None:
            mine = self._mine.bounce = Buffer.allocate(BOUNCE_NBYTES)
        return mine


def is_in_memory(directory: Directory) -> bool:
    """Whether the directory's file system is memory (tmpfs, ramfs): it knows no RWF_NOWAIT."""
    device = os.fstat(directory.fd).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    for mount in mounts:  # proc_pid_mountinfo(5): ... major:minor ... - type source options
        before, _, after = mount.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in ("tmpfs", "ramfs")
    return False


def _write_all(fd: int, pieces: Sequence[memoryview], direct: bool) -> None:
    nbytes = sum(piece.nbytes for piece in pieces)
    done = 0
    while done < nbytes:
        done += os.pwritev(fd, _after(pieces, done), done)
        if direct and done % ALIGNMENT:  # a short write; what is left has no alignment any more
            fcntl.fcntl(fd, fcntl.F_SETFL, 0)
            direct = False


def _after(pieces: Sequence[memoryview], done: int) -> Sequence[memoryview]:
    """What is left of the pieces after ``done`` bytes, as much as one system call takes."""
    if done == 0:
        return pieces if len(pieces) <= _IOV_MAX else pieces[:_IOV_MAX]
    left: list[memoryview] = []
    for piece in pieces:
        if done >= piece.nbytes:
            done -= piece.nbytes
        else:
            left.append(piece[done:])
            done = 0
            if len(left) == _IOV_MAX:
                break
    return left


def _copy_out(source: Buffer, page: Page, offset: int) -> None:
    """Copy ``source`` to the page's bytes from ``offset`` on."""
    address, left = source.address, source.nbytes
    for buffer in page:
        if offset >= buffer.nbytes:
            offset -= buffer.nbytes
            continue
        count = min(left, buffer.nbytes - offset)
        ctypes.memmove(buffer.address + offset, address, count)
        address, left, offset = address + count, left - count, 0
        if left == 0:
            return
