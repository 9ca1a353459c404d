"""Pages by presigned request: received from the socket straight into the caller's memory, and sent from it.

Whatever this does not understand (redirects, chunked bodies, refusals) is ``Puzzled``, and the page goes
through the general client instead. It costs less CPU than that one: no copy, and no second set of threads.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Page, page_nbytes, views
from hicache_storage.deadline import time_left
from hicache_storage.errors import DeadlineError, UnavailableError
from hicache_storage.storage import Status
from hicache_storage_s3.s3errors import answer
from hicache_storage_s3.wire import Connection, PuzzledError

T = TypeVar("T")


class Direct:
    """One connection a thread, kept open between pages. Thread-safe.

    Its calls raise PuzzledError, UnavailableError (the store's or the network's failure), or
    DeadlineError: the page's caller has gone, or the request took too long.
    """

    def __init__(self, connect_seconds: float, request_seconds: float, ca_file: Path | None) -> None:
        """Raises OSError when the CA file cannot be used."""
        self._connect_seconds = connect_seconds
        self._request_seconds = request_seconds
        self._tls = ssl.create_default_context()
        if ca_file is not None:
            self._tls.load_verify_locations(ca_file.expanduser())
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._connections: set[Connection] = set()

    def read_into(self, url: str, page: Page, lease: Lease) -> Status:
        """OK, MISSING, or CORRUPT when the object is not of the page's size."""

        def read(connection: Connection, host: str, target: str, ends_at: float) -> Status:
            head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n\r\n"
            connection.send(head, (), lease, ends_at)
            found = connection.answer(ends_at)
            if found.nbytes is None:
                raise PuzzledError(f"an answer {found.status} of unknown length")
            if found.status == 200:
                if found.nbytes != page_nbytes(page):
                    connection.keep = False
                    return Status.CORRUPT
                connection.receive(views(page), found.early, lease, ends_at)
                return Status.OK
            body = connection.refusal(found, ends_at)
            if found.status == 404 and b"NoSuchBucket" not in body:
                return Status.MISSING
            raise _refused(found.status, "reading a page")

        return self._exchange(url, read, "reading a page")

    def write_from(
        self, url: str, page: Page, lease: Lease, *, create: bool, header: tuple[str, str] | None = None
    ) -> bool:
        """Whether the object was stored; False when ``create`` found one there.

        The page is read while it is sent; an object whose sending broke off is not stored.
        """
        lines = [f"Content-Length: {page_nbytes(page)}"]
        lines += ["If-None-Match: *"] if create else []
        lines += [": ".join(header)] if header else []

        def write(connection: Connection, host: str, target: str, ends_at: float) -> bool:
            head = "\r\n".join([f"PUT {target} HTTP/1.1", f"Host: {host}", *lines, "\r\n"])
            complete = connection.send(head, views(page), lease, ends_at)
            found = connection.answer(ends_at)
            connection.refusal(found, ends_at)
            if complete and found.status in (200, 201, 204):
                return True
            if create and found.status == 412:
                return False
            raise _refused(found.status, "storing a page")

        return self._exchange(url, write, "storing a page")

    def close(self) -> None:
        """Close all connections; no request may be in progress."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            connection.close()

    def _exchange(self, url: str, use: Callable[[Connection, str, str, float], T], doing: str) -> T:
        scheme, _, rest = url.partition("://")
        host, _, target = rest.partition("/")
        left = time_left()
        seconds = self._request_seconds if left is None else min(self._request_seconds, left)
        ends_at = time.monotonic() + seconds
        connection: Connection | None = getattr(self._mine, "connection", None)
        try:
            if connection is None or not connection.usable((scheme, host)):
                self._drop(connection)
                connection = self._connect(scheme, host, ends_at)
            result = use(connection, host, f"/{target}", ends_at)
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, OSError):  # its text may name hosts only, but never mind
                raise UnavailableError(f"{doing} broke off: {type(error).__name__}") from None
            raise
        if not connection.keep:
            self._drop(connection)
        return result

    def _connect(self, scheme: str, host: str, ends_at: float) -> Connection:
        seconds = min(self._connect_seconds, ends_at - time.monotonic())
        if seconds <= 0:
            raise DeadlineError("there was no time left to connect to the store")
        made = Connection((scheme, host), seconds, self._tls if scheme == "https" else None)
        with self._lock:
            self._connections.add(made)
        self._mine.connection = made
        return made

    def _drop(self, connection: Connection | None) -> None:
        self._mine.connection = None
        if connection is not None:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


def _refused(status: int, doing: str) -> Exception:
    """The store's failure, or what only the general client can explain."""
    if status in (408, 409, 429) or status >= 500:
        return answer(status, "", doing)
    return PuzzledError(f"an answer {status}")
