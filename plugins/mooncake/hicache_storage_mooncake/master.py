"""The master as seen from outside Mooncake's client: whether it answers, and what it counts.

Mooncake's own client is a poor judge: ``setup`` without a master holds the GIL for 90 s, a call
after the master was killed takes 4.3 s, and ``health_check`` says fine half a minute later
(0.3.13.post1). A plain socket knows in a millisecond.
"""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from hicache_storage import SettingsError, UnavailableError, time_left

NO_TENANTS = 409
"""What the master answers about tenants when it keeps none apart."""

PROBE_SECONDS = 0.3
"""Longest wait for an answer of a master that is already under suspicion."""

_REQUEST = b"GET /health HTTP/1.0\r\n\r\n"
"""An HTTP server answers this, and a master hangs up, as it speaks another protocol; both are alive.
One that is stopped accepts it and stays silent.
"""

METRICS = {
    "capacity": "master_total_capacity_bytes",
    "allocated": "master_allocated_bytes",
    "keys": "master_key_count",
    "clients": "master_active_clients",
}
"""Facts that ``counters`` reads, and their names in the master's Prometheus text."""


def endpoints(address: str) -> list[tuple[str, int]]:
    """(host, port) of each server in ``host:port``, ``etcd://a:1;b:2`` or ``http://host:port/path``.

    Raises SettingsError.
    """
    scheme, separator, rest = address.partition("://")
    servers = rest if separator else scheme
    found = []
    for server in servers.replace(",", ";").split(";"):
        host, colon, port = server.partition("/")[0].rpartition(":")
        if not colon and scheme in ("http", "https"):
            host, port = server.partition("/")[0], str({"http": 80, "https": 443}[scheme])
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise SettingsError(f"{address!r} names no server: host:port is due, such as 10.0.0.1:50051")
        found.append((host.strip("[]"), int(port)))
    return found


def answers(server: tuple[str, int], seconds: float) -> bool:
    """Whether a server process is alive at the other end: it must react, not only be connected to."""
    ends_at = time.monotonic() + seconds
    try:
        with socket.create_connection(server, timeout=seconds) as connection:
            connection.settimeout(max(0.001, ends_at - time.monotonic()))
            connection.sendall(_REQUEST)
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True


class Master:
    """One master, or the etcd servers that elect one. Safe from several threads."""

    def __init__(self, address: str, metrics_port: int) -> None:
        """Raises SettingsError when ``address`` names no server."""
        self.address = address
        self._servers = endpoints(address)
        self._elected = "://" in address
        self._metrics_port = metrics_port
        self._silent = False

    def reachable(self, seconds: float) -> bool:
        """Whether any of the servers reacts, each within ``seconds``."""
        return any(answers(server, seconds) for server in self._servers)

    def wait(self, seconds: float) -> None:
        """Return once the master answers. Raises UnavailableError after ``seconds``."""
        ends_at = time.monotonic() + seconds
        while not self.reachable(min(1.0, max(0.05, seconds))):
            if time.monotonic() > ends_at:
                raise UnavailableError(f"no Mooncake master answers at {self.address}")
            time.sleep(0.05)

    def known_dead(self) -> bool:
        """Whether the master did not answer last time, and still does not. Costs at most PROBE_SECONDS."""
        if not self._silent:
            return False
        left = time_left()
        return not self.reachable(PROBE_SECONDS if left is None else min(PROBE_SECONDS, max(0.01, left / 2)))

    def heard(self, silent: bool) -> None:
        """Note whether a call of Mooncake's client found the master silent."""
        self._silent = silent

    def tenants(self, seconds: float = 1.0) -> list[str] | None:
        """The tenants that the master keeps apart; None when it cannot be asked, empty when it keeps none."""
        try:
            found = json.loads(self._http("/api/v1/tenant_quotas", seconds))
            return [str(tenant["tenant_id"]) for tenant in found["data"]]
        except urllib.error.HTTPError as error:
            return [] if error.code == NO_TENANTS else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def counters(self, seconds: float = 0.3) -> dict[str, int]:
        """What the master counts (see METRICS), as far as it can be reached in time."""
        try:
            text = self._http("/metrics", seconds)
        except OSError:
            return {}
        values = parse_metrics(text.splitlines())
        return {fact: int(values[name]) for fact, name in METRICS.items() if name in values}

    def _http(self, path: str, seconds: float) -> str:
        """Raises OSError, also where masters are elected: who leads is in etcd, in a form of its own."""
        if self._elected:
            raise OSError("the leader is not known")
        return read_http(f"http://{self._servers[0][0]}:{self._metrics_port}{path}", seconds)


def read_http(url: str, seconds: float) -> str:
    """The text at ``url``, read without any proxy. Raises OSError."""
    assert urlsplit(url).scheme == "http"
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(url, timeout=seconds) as response:
        text: str = response.read().decode(errors="replace")
    return text


def parse_metrics(lines: Sequence[str]) -> dict[str, float]:
    """Values of the metrics without labels in Prometheus' text format."""
    values = {}
    for line in lines:
        name, space, value = line.partition(" ")
        if space and not name.startswith("#") and "{" not in name:
            try:
                values[name] = float(value)
            except ValueError:
                continue
    return values
