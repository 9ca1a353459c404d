"""One Mooncake client a process and a set of settings, shared by all storages that ask for it.

Closing a client takes up to 1 s and holds the GIL all the while (0.3.13.post1). So a client, which
is a few threads and sockets, stays for the next storage until the process ends. The memory that it
contributes comes and goes by itself (``segments``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hicache_storage import Buffer, BufferMismatchError, SettingsError, UnavailableError
from hicache_storage_mooncake import forked, library
from hicache_storage_mooncake.master import Master
from hicache_storage_mooncake.segments import Segments
from hicache_storage_mooncake.settings import DEFAULT_TENANT, MIN_SEGMENT_NBYTES, MooncakeSettings

logger = logging.getLogger(__name__)

OPEN_SECONDS = 2.0
CHECK_SERVER_SECONDS = 60.0
PROGRESS_SECONDS = 2
"""A TCP transfer that does not move for this long is given up and its socket closed (default 30)."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What two storages must have in common to share a client."""

    master: str
    hostname: str
    metadata: str
    buffer_nbytes: int
    protocol: str
    devices: str
    tenant: str
    ssd_path: str


class Client:
    """A ``MooncakeDistributedStore`` after a successful ``setup``, and the memory it knows."""

    def __init__(self, identity: Identity, master: Master, rpc_seconds: float) -> None:
        """Raises UnavailableError, or SettingsError when the disk directory is somebody else's."""
        self.identity = identity
        self.master = master
        self.users = 0
        self._lock = threading.Lock()
        self._registered: Counter[tuple[int, int]] = Counter()
        module = library.load()
        _tune(rpc_seconds)
        self._disk_lock = _lock_directory(identity.ssd_path)
        self.store: Any = module.MooncakeDistributedStore()
        code = self.store.setup(
            identity.hostname,
            identity.metadata,
            0,
            identity.buffer_nbytes,
            identity.protocol,
            identity.devices,
            identity.master,
            **_options(identity),
        )
        forked.started(self.store)
        if code != 0:
            self.close()
            raise UnavailableError(
                f"Mooncake did not start (code {code}) with master {identity.master}, metadata server "
                f"{identity.metadata} and protocol {identity.protocol}; its log on stderr says more"
            )
        self.segments = Segments(self.store, identity.protocol)

    def register(self, buffer: Buffer) -> None:
        """Make the memory known; several registrations of the same memory count.

        Raises BufferMismatchError when it overlaps memory that is registered.
        """
        span = (buffer.address, buffer.nbytes)
        with self._lock:
            if not self._registered[span]:
                code = self.store.register_buffer(*span)
                if code != 0:
                    raise BufferMismatchError(
                        f"Mooncake refuses {buffer.nbytes} bytes at {buffer.address:#x} (code {code}): "
                        "they overlap registered memory, or more memory is locked than ulimit -l allows"
                    )
            self._registered[span] += 1

    def unregister(self, buffer: Buffer) -> None:
        """Take back one ``register``; no call in progress may use the memory."""
        span = (buffer.address, buffer.nbytes)
        with self._lock:
            if not self._registered[span]:
                return
            self._registered[span] -= 1
            if not self._registered[span]:
                del self._registered[span]
                code = self.store.unregister_buffer(buffer.address)
                if code != 0:
                    logger.warning("Mooncake did not let go of memory at %#x (code %d)", buffer.address, code)

    def close(self) -> None:
        """End the client; nobody may be inside a call."""
        self.store.close()
        forked.ended(self.store)
        if self._disk_lock is not None:
            os.close(self._disk_lock)


_clients: dict[Identity, Client] = {}
_lock = threading.Lock()


def acquire(settings: MooncakeSettings, ranks: tuple[tuple[str, int, int], ...]) -> Client:
    """The client for these settings, made when there is none. Give it back with ``release``.

    Raises UnavailableError when no master answers, before Mooncake is asked for anything, SettingsError
    when it does not know the tenant, and UnsupportedError in a process forked from one with a client.
    """
    forked.check()
    identity = _identify(settings, ranks)
    with _lock:
        client = _clients.get(identity)
        master = Master(settings.master_server_address, settings.master_metrics_port)
        master.wait(CHECK_SERVER_SECONDS if settings.check_server else OPEN_SECONDS)
        if client is None:
            if settings.metadata_server != "P2PHANDSHAKE":
                Master(settings.metadata_server, settings.master_metrics_port).wait(OPEN_SECONDS)
            _check_tenant(settings.tenant_id, master)
            client = _clients[identity] = Client(identity, master, settings.rpc_seconds)
        client.users += 1
    return client


def release(client: Client) -> None:
    """The opposite of ``acquire``; the client stays for the next one who asks."""
    with _lock:
        client.users -= 1


def close_idle() -> None:
    """Close the clients that no storage uses; it holds the GIL for up to 1 s each.

    For a program that is done with Mooncake before it ends, or whose master is about to go.
    """
    if forked.inherited():
        return
    with _lock:
        for identity in [identity for identity, client in _clients.items() if not client.users]:
            _clients.pop(identity).close()


def share_nbytes(settings: MooncakeSettings, ranks: tuple[tuple[str, int, int], ...]) -> int:
    """What one rank contributes: as in SGLang, ``global_segment_size`` is for the whole deployment.

    Raises SettingsError when that is too little.
    """
    share = settings.global_segment_size
    for _, _, size in ranks:
        share //= size
    if settings.global_segment_size and share < MIN_SEGMENT_NBYTES:
        raise SettingsError(
            f"global_segment_size of {settings.global_segment_size} bytes leaves less than 16mb a rank"
        )
    return share


def _check_tenant(tenant: str, master: Master) -> None:
    """A master that keeps no tenants apart takes any name, and lets everybody read everything."""
    if tenant == DEFAULT_TENANT:
        return
    known = master.tenants()
    if known is None:
        logger.warning(
            "tenant_id=%s keeps nothing apart unless the master runs with --enable_multi_tenants=true, and "
            "it could not be asked (master_metrics_port); the setting tenant does, on any master",
            tenant,
        )
    elif not known:
        raise SettingsError(
            f"tenant_id: the master at {master.address} keeps no tenants apart; start it with "
            "--enable_multi_tenants=true, or use the setting tenant, which works on any master"
        )
    elif tenant not in known:
        raise SettingsError(f"tenant_id: the master knows no {tenant}; it knows {', '.join(known)}")


def _identify(settings: MooncakeSettings, ranks: tuple[tuple[str, int, int], ...]) -> Identity:
    """As in SGLang, each rank spills to a directory of its own."""
    path = ""
    if settings.enable_ssd_offload and settings.ssd_offload_path is not None and settings.global_segment_size:
        name = "_".join(f"{axis}{rank}of{size}" for axis, rank, size in ranks) or "all"
        path = str(settings.ssd_offload_path / f"rank_{name}")
    return Identity(
        master=settings.master_server_address,
        hostname=settings.local_hostname,
        metadata=settings.metadata_server,
        buffer_nbytes=settings.local_buffer_size,
        protocol=settings.protocol,
        devices=settings.device_name,
        tenant=settings.tenant_id,
        ssd_path=path,
    )


def _options(identity: Identity) -> dict[str, Any]:
    """Arguments of ``setup`` that not every version has: only those that are asked for."""
    options: dict[str, Any] = {}
    if identity.tenant != DEFAULT_TENANT:
        options["tenant_id"] = identity.tenant
    if identity.ssd_path:
        options |= {"enable_ssd_offload": True, "ssd_offload_path": identity.ssd_path}
    return options


def _tune(rpc_seconds: float) -> None:
    """Mooncake reads its limits from the environment; what the operator has set there stands.

    Over TCP each buffer is a transfer of its own. Over 2,048 of them at once overflow the queue as it
    is by default: some calls then hang for 60 s, and every later one fails (0.3.13.post1).
    """
    os.environ.setdefault("MC_RPC_TIMEOUT_MS", str(int(rpc_seconds * 1000)))
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_SECONDS))
    os.environ.setdefault("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    os.environ.setdefault("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")


def _lock_directory(path: str) -> int | None:
    """Two clients that spill to one directory truncate each other's files, silently."""
    if not path:
        return None
    Path(path).mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise SettingsError(f"ssd_offload_path: another process spills to {path}") from error
    return descriptor
