"""An HTTP proxy in front of a store that answers badly when it is told to."""

import contextlib
import http.client
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Fault:
    """What happens to one answer. By default nothing does."""

    delay: float = 0.0
    status: int = 0
    code: str = "InternalError"
    keep: int | None = None
    """Bytes of the body that are sent before the connection is cut."""
    extra: bytes = b""
    """Sent after the body, beyond what was announced."""
    announce: int = 0
    """Added to the announced length, and to the body."""
    drip: float = 0.0
    """Seconds between single bytes of the body."""
    hole: bool = False
    """No answer at all, until the proxy is released."""
    flip: int | None = None
    """The byte of the body whose bits are inverted."""
    takes: int | None = None
    """Bytes of the request's body that are read; then comes the status, the hole, or the end."""
    stall_at: int | None = None
    """Bytes of the body that are sent before nothing more comes, until the proxy is released."""


@dataclass
class Proxy:
    """Forwards to ``upstream`` (host, port). ``fault`` says what to do to (method, path)."""

    upstream: tuple
    fault: object = None
    tls: object = None
    """An ssl.SSLContext with a certificate, to be spoken to by https."""
    hear: object = None
    """Called with the headers of each request."""
    requests: Counter = field(default_factory=Counter)
    seen: list = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    connections: list = field(default_factory=list)
    reached: threading.Event = field(default_factory=threading.Event)
    """Set when a request has met a hole or a stall."""

    def __post_init__(self):
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._server.handle_error = lambda *_: None
        if self.tls is not None:
            self._server.socket = self.tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self):
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self._server.server_port}"

    def forget(self):
        self.requests.clear()
        self.seen.clear()

    def close(self):
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.owner.connections.append(self.connection)

    wbufsize = 1 << 16

    def log_message(self, *_):
        pass

    def _relay(self):
        proxy = self.owner
        proxy.requests[self.command] += 1
        proxy.seen.append((self.command, self.path))
        if proxy.hear:
            proxy.hear(self.headers)
        fault = (proxy.fault and proxy.fault(self.command, self.path)) or Fault()
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length if fault.takes is None else min(fault.takes, length))
        if len(body) < length:
            self.close_connection = True
            if not (fault.hole or fault.status):
                return
        if fault.delay:
            time.sleep(fault.delay)
        if fault.hole:
            proxy.reached.set()
            proxy.released.wait(60)
            self.close_connection = True
            return
        if fault.status:
            answer = f"<Error><Code>{fault.code}</Code></Error>".encode()
            self._answer(fault.status, [("Content-Length", str(len(answer)))], answer, Fault())
            if len(body) < length:
                self._linger()
            return
        status, headers, answer = self._ask(body)
        self._answer(status, headers, answer, fault)

    def _ask(self, body):
        connection = http.client.HTTPConnection(*self.owner.upstream, timeout=60)
        try:
            path = self.path  # in full when we are spoken to as a forward proxy
            if path.startswith("http://"):
                path = "/" + path.split("/", 3)[3]
            connection.putrequest(self.command, path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()
        finally:
            connection.close()

    def _answer(self, status, headers, body, fault):
        body = bytearray(body)
        if fault.flip is not None and status == 200 and len(body) > fault.flip:
            body[fault.flip] ^= 0xFF
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() in ("connection", "transfer-encoding", "date", "server"):
                continue
            length = name.lower() == "content-length"
            self.send_header(name, str(int(value) + fault.announce) if length else value)
        if not any(name.lower() == "content-length" for name, _ in headers):
            self.send_header("Content-Length", str(len(body) + fault.announce))
        self.end_headers()
        if self.command == "HEAD":
            return
        body += b"!" * fault.announce
        with contextlib.suppress(OSError):
            if fault.stall_at is not None:
                self._write(body[: fault.stall_at])
                self.owner.reached.set()
                self.owner.released.wait(60)
                self._write(body[fault.stall_at :])
            elif fault.drip:
                for i in range(len(body)):
                    self._write(body[i : i + 1])
                    if self.owner.released.wait(fault.drip):
                        break
                self.close_connection = True
            elif fault.keep is not None:
                self._write(body[: fault.keep])
                self.close_connection = True
            else:
                self._write(bytes(body) + fault.extra)

    def _linger(self):
        """As servers do that answer early: closing at once would reset the connection under the answer."""
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(5)
            while self.connection.recv(65536):
                pass

    def _write(self, some):
        self.wfile.write(some)
        self.wfile.flush()

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _relay  # noqa: N815 (http.server's names)
