"""Stores one page: conditionally in one request, straight from L2 where that works, or in parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Buffer, Page, copy, page_nbytes
from hicache_storage_s3.client import Client
from hicache_storage_s3.direct import Direct
from hicache_storage_s3.memory import ThreadMemory
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.wire import PuzzledError

logger = logging.getLogger(__name__)

MOST_DOUBTED = 100_000

DIRECT_NBYTES = 384 << 10
"""Smaller pages cost less through obstore, which needs the GIL for fewer steps."""


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
    """Thread-safe. ``direct`` is None where presigned requests are of no use."""

    def __init__(
        self,
        client: Client,
        persistence: Persistence,
        doubts: Doubts,
        direct: Direct | None,
        *,
        conditional: bool,
        part_size: int,
    ) -> None:
        """``conditional``: the store honours If-None-Match."""
        self._client = client
        self._persistence = persistence
        self._doubts = doubts
        self._direct = direct
        self._conditional = conditional
        self._part_size = part_size
        self._memory = ThreadMemory()
        self._puzzled = False

    def write(self, key: str, page: Page, lease: Lease, leaving: Callable[[], object]) -> bool:
        """Whether the object was made now; False: it was there already.

        ``leaving`` is called before the page is first read, which like it happens under the lease only.
        Raises StorageError.
        """
        with lease.held():
            leaving()
        replace = key in self._doubts
        if page_nbytes(page) > self._part_size:
            created = self._persistence.call(lambda: self._write_parts(key, page, lease, replace))
        else:
            create = self._conditional and not replace
            created = self._persistence.call(lambda: self._write_whole(key, page, lease, create))
        self._doubts.discard(key)
        return created

    def close(self) -> None:
        """Close the connections; no write may be in progress."""
        if self._direct is not None:
            self._direct.close()

    def _write_whole(self, key: str, page: Page, lease: Lease, create: bool) -> bool:
        if self._direct is not None and page_nbytes(page) >= DIRECT_NBYTES:
            self._client.count("PUT")
            try:
                return self._direct.write_from(self._client.sign("PUT", key), page, lease, create=create)
            except PuzzledError as error:
                if not self._puzzled:
                    self._puzzled = True
                    logger.warning("%s to a presigned request; pages are stored through obstore then", error)
        memory = self._memory.of(page_nbytes(page))
        with lease.held():
            copy(page, [memory])
        return self._client.put(key, memory.view, create=create)

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
                copy(pieces, [Buffer.of(part)])
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
