"""Mooncake's server processes on this machine, for development and tests.

They are children that die with their parent, whatever becomes of it. Both listen where Mooncake
lets them: the master on loopback only, a store owner on all interfaces (there is no option for it).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from typing_extensions import Self

from hicache_storage import UnavailableError
from hicache_storage_mooncake import library
from hicache_storage_mooncake.master import answers

START_SECONDS = 20.0

_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclass
class Server:
    """A running child process; every signal goes to its pid."""

    process: subprocess.Popen[str]
    address: str

    def stop(self, seconds: float = 5.0) -> None:
        """Ask it to end, then end it. Safe to call twice."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()

    def pause(self) -> None:
        """Stop it without ending it: its sockets stay open and nobody answers. Returns once it stands."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self.process.pid}/task").iterdir())
        while any((task / "stat").read_text().rpartition(") ")[2][0] != "T" for task in tasks):
            time.sleep(0.001)

    def resume(self) -> None:
        """Undo ``pause``."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@dataclass(frozen=True)
class Log:
    """Where a server writes to; None is nowhere."""

    path: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def open(self) -> IO[str]:
        return (self.path or Path(os.devnull)).open("a")


def start_master(
    port: int, metrics_port: int, *flags: str, standby: bool = False, log: Log | None = None
) -> Server:
    """A master on loopback that answers already; ``flags`` are its own, such as ``--client_ttl=10``.

    A ``standby`` does not answer before it leads, and is not waited for.

    Raises UnavailableError when it ends or does not come up, MooncakeMissingError without the wheel.
    """
    for wanted in (port, metrics_port):
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                one.bind(("127.0.0.1", wanted))
            except OSError as error:
                raise UnavailableError(f"port {wanted} cannot be had: {error.strerror}") from error
    command = [
        str(library.binary("mooncake_master")),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        "--logtostderr=true",
        *flags,
    ]
    server = Server(_spawn(command, log or Log()), f"127.0.0.1:{port}")
    ends_at = time.monotonic() + START_SECONDS
    while not standby and not answers(("127.0.0.1", port), 0.5):
        if server.process.poll() is not None or time.monotonic() > ends_at:
            server.stop()
            raise UnavailableError(
                f"mooncake_master does not come up on port {port} (exit {server.process.returncode})"
            )
        time.sleep(0.02)
    return server


def start_owner(
    master: str, segment_nbytes: int, ssd_path: Path | None = None, log: Log | None = None
) -> Server:
    """A process that contributes a segment over tcp and does nothing else; it is mounted on return.

    Raises UnavailableError when Mooncake refuses.
    """
    command = [sys.executable, "-m", "hicache_storage_mooncake.owner", master, str(segment_nbytes)]
    server = Server(_spawn([*command, str(ssd_path)] if ssd_path else command, log or Log()), master)
    assert server.process.stdout is not None
    if server.process.stdout.readline().strip() != "mounted":
        server.stop()
        raise UnavailableError(f"a store of {segment_nbytes} bytes cannot join the master at {master}")
    return server


def _spawn(command: list[str], log: Log) -> subprocess.Popen[str]:
    environment = {"MC_LOG_LEVEL": "WARNING", **os.environ, **log.environment}
    with log.open() as stream:
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-S", "-c", _DIE_WITH_PARENT, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C is for whoever started it
        )
