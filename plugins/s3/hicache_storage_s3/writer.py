"""Stores one page: conditionally in one request, or in parts when it is large."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Buffer, Page, page_nbytes
from hicache_storage_s3.client import Client
from hicache_storage_s3.memory import ThreadMemory, copy_page
from hicache_storage_s3.retry import Persistence

MOST_DOUBTED = 100_000


class Doubts:
    """Keys whose object is not the page: the next write must replace it. Thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[str, None] = {}
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str]) -> None:
        with self._lock:
            self._keys.update(dict.fromkeys(keys))
            while len(self._keys) > MOST_DOUBTED:
                del self._keys[next(iter(self._keys))]

    def discard(self, key: str) -> None:
        if self._keys:
            with self._lock:
                self._keys.pop(key, None)

    def __contains__(self, key: str) -> bool:
        return key in self._keys


class Writer:
    """Thread-safe. ``conditional``: the store honours If-None-Match."""

    def __init__(
        self, client: Client, persistence: Persistence, doubts: Doubts, *, conditional: bool, part_size: int
    ) -> None:
        self._client = client
        self._persistence = persistence
        self._doubts = doubts
        self._conditional = conditional
        self._part_size = part_size
        self._memory = ThreadMemory()

    def write(self, key: str, page: Page, lease: Lease) -> bool:
        """Whether the object was made now; False: it was there already.

        Raises StorageError. The page is read under its lease only, before it is sent.
        """
        nbytes = page_nbytes(page)
        replace = key in self._doubts
        if nbytes > self._part_size:
            created = self._persistence.call(lambda: self._write_parts(key, page, lease, replace))
        else:
            memory = self._memory.of(nbytes)
            with lease.held():
                copy_page(page, memory)
            created = self._persistence.call(lambda: self._write_whole(key, memory.view, replace))
        self._doubts.discard(key)
        return created

    def _write_whole(self, key: str, body: memoryview, replace: bool) -> bool:
        return self._client.put(key, body, create=self._conditional and not replace)

    def _write_parts(self, key: str, page: Page, lease: Lease, replace: bool) -> bool:
        # a part upload cannot be conditional here, and a request costs less than many parts
        found = None if replace else self._client.head(key)
        if found is not None and found["size"] == page_nbytes(page):
            return False
        self._client.put_parts(key, self._parts(page, lease), self._part_size)
        return True

    def _parts(self, page: Page, lease: Lease) -> Iterator[bytes]:
        for pieces in cut_page(page, self._part_size):
            part = bytearray(page_nbytes(pieces))
            with lease.held():
                copy_page(pieces, Buffer.of(part))
            yield bytes(part)


def cut_page(page: Page, nbytes: int) -> Iterator[list[Buffer]]:
    """The page in parts of ``nbytes`` bytes, the last one smaller."""
    part: list[Buffer] = []
    room = nbytes
    for buffer in page:
        offset = 0
        while offset < buffer.nbytes:
            count = min(room, buffer.nbytes - offset)
            part.append(buffer.slice(offset, count))
            offset += count
            room -= count
            if room == 0:
                yield part
                part, room = [], nbytes
    if part:
        yield part
