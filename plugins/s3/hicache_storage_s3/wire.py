"""One HTTP/1.1 connection that never blocks, for requests whose body lies in the caller's memory.

It knows one kind of answer: a status, a Content-Length, a body. Bytes are sent from and received into
a page under its lease, in steps that move what the kernel takes or has, and return; waiting happens
outside. Once sent, bytes are the kernel's: a request that is broken off reads the page no further.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from hicache_storage.batch_pool import Lease
from hicache_storage.errors import DeadlineError, UnavailableError

_HEAD_NBYTES = 16384
_SMALL_BODY = 16384
_WAKE_NBYTES = 262144
"""The kernel wakes us when so many bytes have come, not for every segment."""

_MOST_PIECES = 512
"""In one sendmsg; Linux takes 1024."""


class PuzzledError(Exception):
    """An answer this client does not understand; it says what it was."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything before the body, and as much of the body as came with it."""

    status: int
    nbytes: int | None
    """Length of the body; None when the answer does not say so plainly."""
    early: bytes


class Connection:
    """Connected; for one thread. Raises OSError where the network fails."""

    def __init__(self, origin: tuple[str, str], seconds: float, tls: ssl.SSLContext | None) -> None:
        """``origin``: scheme, and host with port. ``seconds``: to connect and greet."""
        self._origin = origin
        self.keep = True
        """Whether another request may follow on it."""
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
        self._readable, self._movable = select.poll(), select.poll()
        self._is_tls = tls is not None
        self._readable.register(self._sock, select.POLLIN)
        # what TLS has to read need not be an answer
        self._movable.register(self._sock, select.POLLOUT | (0 if self._is_tls else select.POLLIN))
        self._wakes_at = 1

    def usable(self, origin: tuple[str, str]) -> bool:
        """Whether the next request may go over it: same origin, and nothing has come unasked."""
        return origin == self._origin and not self._readable.poll(0)

    def send(self, head: str, body: Sequence[memoryview], lease: Lease, ends_at: float) -> bool:
        """Send a request; False when the answer came first, and the rest of the body was not sent.

        Raises DeadlineError at ``ends_at`` (monotonic) or when the lease is withdrawn.
        """
        pieces = [memoryview(head.encode()), *body]
        while pieces:
            with lease.held():
                count = self._send_now(pieces)
            if count is None:
                if self._wait(self._movable, ends_at) & select.POLLIN:
                    self.keep = False
                    return False
                continue
            while pieces and count >= pieces[0].nbytes:
                count -= pieces.pop(0).nbytes
            if count:
                pieces[0] = pieces[0][count:]
            if time.monotonic() > ends_at:
                raise DeadlineError("the request could not be sent in time")
        return True

    def answer(self, ends_at: float) -> Answer:
        """Raises PuzzledError, UnavailableError or DeadlineError."""
        raw = bytearray()
        memory = bytearray(_HEAD_NBYTES)
        while (end := raw.find(b"\r\n\r\n")) < 0:
            count = self._receive_now(memoryview(memory))
            if count is None:
                self._wait(self._readable, ends_at)
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
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip()
        if version != b"HTTP/1.1" or headers.get(b"connection", b"").lower() == b"close":
            self.keep = False
        status, early = int(rest[:3]), bytes(raw[end + 4 :])
        length = b"0" if status == 204 else headers.get(b"content-length", b"")
        plain = not (b"transfer-encoding" in headers or b"content-encoding" in headers)
        return Answer(status, int(length) if plain and length.isdigit() else None, early)

    def receive(self, targets: Sequence[memoryview], early: bytes, lease: Lease, ends_at: float) -> None:
        """Fill the targets with the body, whose first bytes came ``early``.

        Raises UnavailableError or DeadlineError.
        """
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
                    self._wake_at(min(left, _WAKE_NBYTES))
                    self._wait(self._readable, ends_at)
                elif count == 0:
                    raise UnavailableError("the store broke off in the middle of a page")
                else:
                    start += count
                    left -= count
                    if time.monotonic() > ends_at:  # a slow drip never waits for long
                        raise DeadlineError("the page did not come in time")
        self._wake_at(1)

    def refusal(self, answer: Answer, ends_at: float) -> bytes:
        """A small body, read so that the connection can be used again; else as much as there is."""
        if answer.nbytes is None or answer.nbytes > _SMALL_BODY or len(answer.early) > answer.nbytes:
            self.keep = False
            return answer.early
        body = bytearray(answer.nbytes)
        try:
            self.receive([memoryview(body)], answer.early, Lease(), ends_at)
        except (DeadlineError, UnavailableError):
            self.keep = False
        return bytes(body)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.close()

    def _send_now(self, pieces: Sequence[memoryview]) -> int | None:
        """Bytes sent, None when there is no room now."""
        try:
            if self._is_tls:
                return self._sock.send(pieces[0])
            return self._sock.sendmsg(pieces[:_MOST_PIECES])
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return None

    def _receive_now(self, target: memoryview) -> int | None:
        """Bytes received, 0 at the end of the stream, None when there are none yet."""
        try:
            return self._sock.recv_into(target)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None

    def _wake_at(self, nbytes: int) -> None:
        """Have the kernel wake us for no fewer bytes; it cannot tell how many TLS records those are."""
        if not self._is_tls and nbytes != self._wakes_at:
            self._wakes_at = nbytes
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, nbytes)

    def _wait(self, poll: select.poll, ends_at: float) -> int:
        """What the socket is ready for, as poll's flags. Raises DeadlineError at ``ends_at``."""
        seconds = ends_at - time.monotonic()
        ready = poll.poll(seconds * 1000) if seconds > 0 else []
        if not ready:
            raise DeadlineError("the store did not answer in time")
        return ready[0][1]
