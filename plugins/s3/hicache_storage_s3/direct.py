"""Reads pages by presigned GET, from the socket straight into the caller's memory.

A small HTTP/1.1 client that knows one kind of answer: a status, a Content-Length, a body. Its
sockets never block, so bytes are received into the page under its lease, in steps that take what
is there and return; waiting happens outside. Whatever it does not understand (redirects, chunked
bodies, refusals) is ``Puzzled``, and the page is read by the general client instead.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Page, page_nbytes, views
from hicache_storage.deadline import time_left
from hicache_storage.errors import DeadlineError, UnavailableError
from hicache_storage.storage import Status
from hicache_storage_s3.s3errors import answer

_HEAD_NBYTES = 16384
_SMALL_BODY = 16384
_WAKE_NBYTES = 262144
"""The kernel wakes us when so many bytes have come, not for every segment."""


class PuzzledError(Exception):
    """An answer this client does not understand; it says what it was."""


class DirectReader:
    """One connection a thread, kept open between pages."""

    def __init__(self, connect_seconds: float, request_seconds: float, ca_file: Path | None) -> None:
        """Raises OSError when the CA file cannot be used."""
        self._connect_seconds = connect_seconds
        self._request_seconds = request_seconds
        self._tls = ssl.create_default_context()
        if ca_file is not None:
            self._tls.load_verify_locations(ca_file.expanduser())
        self._mine = threading.local()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()

    def read_into(self, url: str, page: Page, lease: Lease) -> Status:
        """OK, MISSING, or CORRUPT when the object is not of the page's size.

        Raises PuzzledError, UnavailableError (the store's or the network's failure), or
        DeadlineError: the page's caller has gone, or the request took too long.
        """
        scheme, _, rest = url.partition("://")
        host, _, target = rest.partition("/")
        left = time_left()
        ends_at = time.monotonic() + min(
            self._request_seconds, self._request_seconds if left is None else left
        )
        connection: _Connection | None = getattr(self._mine, "connection", None)
        try:
            if connection is None or not connection.usable((scheme, host)):
                self._drop(connection)
                connection = self._connect(scheme, host, ends_at)
            status = connection.get(f"/{target}", page, lease, ends_at)
        except BaseException as error:
            self._drop(connection)
            if isinstance(error, OSError):  # its text may name hosts only, but never mind
                raise UnavailableError(f"reading a page broke off: {type(error).__name__}") from None
            raise
        if not connection.keep:
            self._drop(connection)
        return status

    def close(self) -> None:
        """Close all connections; no read may be in progress."""
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:
            connection.close()

    def _connect(self, scheme: str, host: str, ends_at: float) -> _Connection:
        seconds = min(self._connect_seconds, ends_at - time.monotonic())
        if seconds <= 0:
            raise DeadlineError("there was no time left to connect to the store")
        made = _Connection((scheme, host), seconds, self._tls if scheme == "https" else None)
        with self._lock:
            self._connections.add(made)
        self._mine.connection = made
        return made

    def _drop(self, connection: _Connection | None) -> None:
        self._mine.connection = None
        if connection is not None:
            with self._lock:
                self._connections.discard(connection)
            connection.close()


class _Connection:
    """A connected, non-blocking socket and what was read too early."""

    def __init__(self, origin: tuple[str, str], seconds: float, tls: ssl.SSLContext | None) -> None:
        self._origin = origin
        self.keep = True
        parts = urlsplit(f"{origin[0]}://{origin[1]}")
        port = parts.port or (443 if tls else 80)
        plain = socket.create_connection((parts.hostname or "", port), seconds)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = plain if tls is None else tls.wrap_socket(plain, server_hostname=parts.hostname)
        except BaseException:
            plain.close()
            raise
        self._sock.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._sock, select.POLLIN)
        self._wakes_at = 1
        self._is_tls = tls is not None

    def usable(self, origin: tuple[str, str]) -> bool:
        """Whether the next request may go over it: same origin, and nothing has come unasked."""
        if origin != self._origin:
            return False
        return not self._poll.poll(0)

    def get(self, target: str, page: Page, lease: Lease, ends_at: float) -> Status:
        host = self._origin[1]
        self._send(
            f"GET {target} HTTP/1.1\r\nHost: {host}\r\nAccept-Encoding: identity\r\n\r\n".encode(), ends_at
        )
        status, headers, early = self._head(ends_at)
        if headers.get(b"connection", b"").lower() == b"close":
            self.keep = False
        length = headers.get(b"content-length", b"")
        if b"transfer-encoding" in headers or b"content-encoding" in headers or not length.isdigit():
            raise PuzzledError(f"an answer {status} of unknown length")
        nbytes = int(length)
        if status == 200:
            if nbytes != page_nbytes(page):
                self.keep = False
                return Status.CORRUPT
            self._receive(views(page), early, lease, ends_at)
            return Status.OK
        body = self._small_body(early, nbytes, ends_at)
        if status == 404 and b"NoSuchBucket" not in body:
            return Status.MISSING
        if status in (408, 429) or status >= 500:
            raise answer(status, "", "reading a page")
        raise PuzzledError(f"an answer {status}")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _receive(self, targets: Sequence[memoryview], early: bytes, lease: Lease, ends_at: float) -> None:
        """Fill the targets with the body, whose first bytes came ``early``."""
        left = sum(target.nbytes for target in targets) - len(early)
        if left < 0:
            raise UnavailableError("the store sent more than it announced")
        for target in targets:
            start = min(len(early), target.nbytes)
            if start:
                with lease.held():
                    target[:start] = early[:start]
                early = early[start:]
            while start < target.nbytes:
                with lease.held():
                    count = self._receive_now(target[start:])
                if count is None:
                    self._wait(min(left, _WAKE_NBYTES), ends_at)
                elif count == 0:
                    raise UnavailableError("the store broke off in the middle of a page")
                else:
                    start += count
                    left -= count
                    if time.monotonic() > ends_at:  # a slow drip never waits for long
                        raise DeadlineError("the page did not come in time")
        if self._wakes_at != 1:
            self._wake_at(1)

    def _receive_now(self, target: memoryview) -> int | None:
        """Bytes received, 0 at the end of the stream, None when there are none yet."""
        try:
            return self._sock.recv_into(target)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def _wake_at(self, nbytes: int) -> None:
        self._wakes_at = nbytes
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _wait(self, nbytes: int, ends_at: float) -> None:
        """Until ``nbytes`` are there to be received, or at least some."""
        if not self._is_tls and nbytes != self._wakes_at:
            self._wake_at(nbytes)
        seconds = ends_at - time.monotonic()
        if seconds <= 0 or not self._poll.poll(seconds * 1000):
            raise DeadlineError("the page did not come in time")

    def _send(self, request: bytes, ends_at: float) -> None:
        while request:
            try:
                request = request[self._sock.send(request) :]
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                seconds = ends_at - time.monotonic()
                if seconds <= 0 or not select.select([], [self._sock], [], seconds)[1]:
                    raise DeadlineError("the request could not be sent in time") from None

    def _head(self, ends_at: float) -> tuple[int, dict[bytes, bytes], bytes]:
        """Status, headers by lower-case name, and what came of the body with them."""
        raw = bytearray()
        memory = bytearray(_HEAD_NBYTES)
        while (end := raw.find(b"\r\n\r\n")) < 0:
            count = self._receive_now(memoryview(memory))
            if count is None:
                self._wait(1, ends_at)
                continue
            if count == 0:
                raise UnavailableError("the store closed the connection instead of answering")
            raw += memory[:count]
            if len(raw) > 2 * _HEAD_NBYTES:
                raise PuzzledError("headers without an end")
        first, *lines = bytes(raw[:end]).split(b"\r\n")
        version, _, rest = first.partition(b" ")
        if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
            raise PuzzledError("no HTTP answer")
        self.keep = version == b"HTTP/1.1"
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        return int(rest[:3]), headers, bytes(raw[end + 4 :])

    def _small_body(self, early: bytes, nbytes: int, ends_at: float) -> bytes:
        """The body of a refusal, so that the connection can be used again."""
        if nbytes > _SMALL_BODY or len(early) > nbytes:
            self.keep = False
            return early
        body = bytearray(nbytes)
        with contextlib.suppress(DeadlineError):
            self._receive([memoryview(body)], early, Lease(), ends_at)
            return bytes(body)
        self.keep = False
        return bytes(body)
