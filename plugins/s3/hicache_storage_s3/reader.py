"""Reads one page: straight into the caller's memory where that works, else through obstore."""

from __future__ import annotations

import logging

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Page, page_nbytes
from hicache_storage.errors import StorageError
from hicache_storage.storage import Status
from hicache_storage_s3.client import Client
from hicache_storage_s3.direct import Direct
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.s3errors import translate
from hicache_storage_s3.wire import PuzzledError

logger = logging.getLogger(__name__)

CHUNK_NBYTES = 1 << 20
"""Most of a page that is in memory of ours at a time, in each thread."""

DIRECT_NBYTES = 65536
"""Smaller pages are as fast through obstore, which needs no signing of its own."""


class Reader:
    """Thread-safe. ``direct`` is None where presigned requests do not work."""

    def __init__(self, client: Client, persistence: Persistence, direct: Direct | None) -> None:
        self._client = client
        self._persistence = persistence
        self._direct = direct
        self._puzzled = False

    def read_into(self, key: str, page: Page, lease: Lease) -> Status:
        """Raises StorageError; the page is touched only under its lease."""
        return self._persistence.call(lambda: self._read_once(key, page, lease))

    def read(self, key: str) -> bytes | None:
        """The whole object, None when it is not there. Raises StorageError."""

        def once() -> bytes | None:
            found = self._client.open(key)
            if found is None:
                return None
            try:
                return bytes(found.bytes())
            except Exception as error:
                raise translate(error, "reading a page") from None

        return self._persistence.call(once)

    def close(self) -> None:
        """Close the connections; no read may be in progress."""
        if self._direct is not None:
            self._direct.close()

    def _read_once(self, key: str, page: Page, lease: Lease) -> Status:
        with lease.held():  # no request for a caller who has gone
            pass
        if self._direct is not None and page_nbytes(page) >= DIRECT_NBYTES:
            self._client.count("GET")
            try:
                return self._direct.read_into(self._client.sign("GET", key), page, lease)
            except PuzzledError as error:
                if not self._puzzled:
                    self._puzzled = True
                    logger.warning("%s to a presigned request; pages are read through obstore then", error)
        return self._read_chunks(key, page, lease)

    def _read_chunks(self, key: str, page: Page, lease: Lease) -> Status:
        found = self._client.open(key)
        if found is None:
            return Status.MISSING
        nbytes = page_nbytes(page)
        if found.meta["size"] != nbytes:
            return Status.CORRUPT
        cursor = _Cursor(page)
        try:
            for chunk in found.stream(min_chunk_size=CHUNK_NBYTES):
                view = memoryview(chunk)
                if cursor.taken + view.nbytes > nbytes:
                    return Status.CORRUPT
                with lease.held():
                    cursor.take(view)
        except StorageError:
            raise
        except Exception as error:
            raise translate(error, "reading a page") from None
        return Status.OK if cursor.taken == nbytes else Status.CORRUPT


class _Cursor:
    """Where in a page's buffers the next bytes go."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._index = 0
        self._offset = 0
        self.taken = 0

    def take(self, chunk: memoryview) -> None:
        self.taken += chunk.nbytes
        while chunk.nbytes:
            buffer = self._page[self._index]
            count = min(chunk.nbytes, buffer.nbytes - self._offset)
            buffer.slice(self._offset, count).view[:] = chunk[:count]
            chunk = chunk[count:]
            self._offset += count
            if self._offset == buffer.nbytes:
                self._index, self._offset = self._index + 1, 0
