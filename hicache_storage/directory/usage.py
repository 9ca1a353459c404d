"""How much the pages take, known to all processes that share the directory.

One small file of counters for each of the 256 shards over all namespaces, changed under flock: bytes
and pages that are stored, and bytes reserved for pages that are being written. Room is reserved
before a page is written, so a crash makes the counters too high, never too low. A scan of a shard
sets its counters right (ccache keeps its size limit in the same way: counters a subdirectory,
corrected by scans).
"""

from __future__ import annotations

import os
import stat
import struct
import threading
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hicache_storage.directory.locks import locked
from hicache_storage.directory.tree import SHARDS, Directory, Handle, Place, Tree

USAGE = "usage"

ABANDONED_SECONDS = 60
"""A reservation this old in a shard without newer ones is that of a writer that died."""

_HEADING = struct.pack("<8sQ", b"HICUSAG1", SHARDS)
_FIELDS = 4
_STORED, _PAGES, _RESERVED, _RESERVED_AT = range(_FIELDS)
_COUNTERS_NBYTES = 8 * _FIELDS * SHARDS


@dataclass(frozen=True, slots=True)
class Totals:
    """What all pages take, those being written included."""

    nbytes: int
    pages: int


class Usage:
    """The counters. Thread-safe; methods that go to the file may raise OSError."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._lock = threading.Lock()
        self._changes_lock = threading.Lock()
        self._changes: dict[int, list[int]] = {}
        self._handle = self._open()

    def reserve(self, wants: Sequence[tuple[int, int]], capacity: int, spare: int) -> tuple[int, int]:
        """Reserve room for pages, each a shard and a size in bytes, within ``capacity`` and ``spare``.

        Returns for how many of them, from the first on, there was room, and the bytes in use then.
        """
        now = int(time.time())
        with self._counters() as counters:
            used = _sum(counters).nbytes
            room = min(capacity - used, spare)
            for granted, (shard, nbytes) in enumerate(wants):
                if nbytes > room:
                    return granted, used
                room -= nbytes
                used += nbytes
                counters[_FIELDS * shard + _RESERVED] += nbytes
                counters[_FIELDS * shard + _RESERVED_AT] = now
        return len(wants), used

    def stored(self, shard: int, nbytes: int) -> None:
        """A page for which room was reserved is there now."""
        self._change(shard, nbytes, 1, -nbytes)

    def released(self, shard: int, nbytes: int) -> None:
        """A page for which room was reserved will not be written."""
        self._change(shard, 0, 0, -nbytes)

    def removed(self, shard: int, nbytes: int) -> None:
        """A page that was there is not any more."""
        self._change(shard, -nbytes, -1, 0)

    def abandon_reservations(self) -> None:
        """Nobody is writing: what is reserved is left from writers that died.

        They may have stored their last pages without saying so; a recount must find out.
        """
        with self._counters() as counters:
            counters[_RESERVED_AT::_FIELDS] = array("q", bytes(8 * SHARDS))

    def abandoned(self) -> list[int]:
        """Shards with reservations of writers that died, to be recounted."""
        with self._counters() as counters:
            return [shard for shard in range(SHARDS) if _is_abandoned(counters, shard)]

    def totals(self) -> Totals:
        """The sums, with all changes so far, which others see from now on."""
        with self._counters() as counters:
            return _sum(counters)

    def recount(self, shards: Iterable[int] = range(SHARDS)) -> None:
        """Set these shards' counters to what a scan finds.

        Pages stored during the scan are counted on top, found or not: too high, never too low.
        """
        with self._counters() as counters:
            before = counters[:]
        found = {shard: self._scan(shard) for shard in shards}
        with self._counters() as counters:
            for shard, scanned in found.items():
                at = _FIELDS * shard
                for field, count in zip((_STORED, _PAGES), scanned, strict=True):
                    counters[at + field] = count + max(0, counters[at + field] - before[at + field])
                if _is_abandoned(counters, shard):
                    counters[at + _RESERVED] = 0

    def known(self) -> bool:
        """Whether there are counters at all; if not, every shard must be recounted."""
        return os.pread(self._handle.fd, len(_HEADING), 0) == _HEADING

    def forget_removed(self) -> bool:
        """Start a new file if somebody removed ours; True if so."""
        with self._lock:
            if os.fstat(self._handle.fd).st_nlink:
                return False
            self._handle = self._open()
            return True

    def _open(self) -> Handle:
        return self._tree.bookkeeping().open(USAGE, os.O_RDWR | os.O_CREAT)

    def _scan(self, shard: int) -> tuple[int, int]:
        nbytes = pages = 0
        for entry in self._tree.entries(shard):
            nbytes += entry.nbytes
            pages += 1
        return nbytes, pages

    def _change(self, shard: int, *changes: int) -> None:
        """Remember changes of stored, pages and reserved until a call goes to the file."""
        with self._changes_lock:
            known = self._changes.get(shard, (0, 0, 0))
            self._changes[shard] = [a + b for a, b in zip(known, changes, strict=True)]

    @contextmanager
    def _counters(self) -> Iterator[array[int]]:
        """All counters, to read or change under the lock of all processes."""
        with self._lock, locked(self._handle):
            raw = os.pread(self._handle.fd, len(_HEADING) + _COUNTERS_NBYTES, 0)
            usable = len(raw) == len(_HEADING) + _COUNTERS_NBYTES and raw.startswith(_HEADING)
            stored = array("q", raw[len(_HEADING) :] if usable else bytes(_COUNTERS_NBYTES))
            counters = stored[:]
            with self._changes_lock:
                changes, self._changes = self._changes, {}
            for shard, changed in changes.items():
                for field, change in enumerate(changed):
                    counters[_FIELDS * shard + field] += change
                # below zero: the reservation was taken for a dead writer's and dropped
                at = _FIELDS * shard + _RESERVED
                counters[at] = max(0, counters[at])
            try:
                yield counters
                if counters != stored:
                    os.pwrite(self._handle.fd, _HEADING + counters.tobytes(), 0)
            except OSError:
                for shard, changed in changes.items():
                    self._change(shard, *changed)
                raise


def discard(usage: Usage, directory: Directory, place: Place) -> None:
    """Unlink what stands under the name of ``place``, and count it. Raises OSError.

    Only who has unlinked a page counts it as removed, so no page is ever taken off twice.
    """
    try:
        status = os.stat(place.name, dir_fd=directory.fd, follow_symlinks=False)
        os.unlink(place.name, dir_fd=directory.fd)
    except FileNotFoundError:
        return
    if stat.S_ISREG(status.st_mode):
        usage.removed(place.shard, status.st_size)


def _is_abandoned(counters: array[int], shard: int) -> bool:
    reserved, reserved_at = counters[_FIELDS * shard + _RESERVED], counters[_FIELDS * shard + _RESERVED_AT]
    return reserved > 0 and abs(time.time() - reserved_at) > ABANDONED_SECONDS


def _sum(counters: array[int]) -> Totals:
    nbytes = sum(counters[_STORED::_FIELDS]) + sum(counters[_RESERVED::_FIELDS])
    return Totals(nbytes, sum(counters[_PAGES::_FIELDS]))
