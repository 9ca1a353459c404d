"""``hicache-storage mooncake up``: a master and a store on this machine, for development."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from hicache_storage import SettingsError, UnavailableError
from hicache_storage_mooncake.doctor import doctor
from hicache_storage_mooncake.processes import Log, start_master, start_owner
from hicache_storage_mooncake.settings import ENVIRONMENT, MIN_SEGMENT_NBYTES, size_nbytes

END_SECONDS = 2.0
"""Time for a command to end by itself after Ctrl-C."""

app = typer.Typer(name="mooncake", help="Try out Mooncake on this machine.", no_args_is_help=True)


class Protocol(str, Enum):
    """How pages travel."""

    TCP = "tcp"
    RDMA = "rdma"


@app.command()
def up(
    port: Annotated[int, typer.Option(help="The master's port.")] = 50051,
    metrics_port: Annotated[int, typer.Option(help="The master's HTTP port.")] = 9003,
    store: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of a store process; 0 for none.")
    ] = "1gb",
    log: Annotated[Path | None, typer.Option(help="A file for what the processes say.")] = None,
    command: Annotated[
        list[str] | None, typer.Argument(help="Run this, with the settings in its environment, and stop.")
    ] = None,
) -> None:
    """Start a master, and a store process, until Ctrl-C or until COMMAND ends; print the settings to use.

    The master listens on loopback. The store, like every Mooncake client, listens on all
    interfaces: keep it behind a firewall.
    """
    nbytes = _store_nbytes(store)
    done = threading.Event()

    def stop(_: int, __: FrameType | None) -> None:
        done.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with ExitStack() as stack:
        servers = [stack.enter_context(start_master(port, metrics_port, log=Log(log)))]
        if nbytes:
            servers.append(stack.enter_context(start_owner(servers[0].address, nbytes, log=Log(log))))
        settings = {
            "master_server_address": servers[0].address,
            "master_metrics_port": metrics_port,
            "protocol": "tcp",
            "global_segment_size": 0 if nbytes else "1gb",
        }
        if command:
            raise typer.Exit(_run(command, settings, done))
        print(f"master at {servers[0].address}, its metrics at http://127.0.0.1:{metrics_port}/metrics")
        print(f"store of {nbytes >> 20} MiB" if nbytes else "no store: each client contributes memory")
        print("settings:", json.dumps(settings))
        print(f"  hicache-storage launch-args mooncake --config '{json.dumps(settings)}'")
        print("Ctrl-C ends it, and all pages with it", flush=True)
        while not done.wait(0.5):
            for server in servers:
                if server.process.poll() is not None:
                    raise UnavailableError(
                        f"a process ended by itself (exit {server.process.returncode}); see --log"
                    )
        print("stopping", flush=True)
        started = time.monotonic()
    print(f"stopped in {time.monotonic() - started:.1f} s")


def _run(command: list[str], settings: dict[str, object], stopped: threading.Event) -> int:
    """The exit status of a command that finds the store where SGLang would look for it."""
    found = {name: str(settings[key]) for name, key in ENVIRONMENT.items() if key in settings}
    try:
        process = subprocess.Popen(command, env={**os.environ, **found})  # noqa: S603
    except OSError as error:
        raise SettingsError(f"{command[0]}: {error.strerror}") from error
    while process.poll() is None:
        if stopped.wait(0.1):  # Ctrl-C on a terminal has reached the command too
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.terminate()
            process.wait()
    return process.returncode


@app.command("doctor")
def check(
    master: Annotated[str, typer.Option(help="host:port; default: the settings in the environment.")] = "",
    metrics_port: Annotated[int | None, typer.Option(help="The master's HTTP port.")] = None,
    protocol: Annotated[
        Protocol | None, typer.Option(help="What RDMA needs is checked for rdma, SGLang's default.")
    ] = None,
) -> None:
    """Check wheels, RDMA, locked memory and the master; exit status 1 when something is wrong."""
    findings = doctor(master or None, metrics_port, protocol.value if protocol else None)
    for what, ok, message in findings:
        print(f"{'ok  ' if ok else 'FAIL'} {what}: {message}")
    if not all(ok for _, ok, _ in findings):
        raise typer.Exit(1)


def _store_nbytes(text: str) -> int:
    try:
        nbytes = size_nbytes(text)
    except ValueError as error:
        raise SettingsError(f"--store: {error}") from None
    if 0 < nbytes < MIN_SEGMENT_NBYTES:
        raise SettingsError("--store: at least 16mb, or 0")
    return nbytes
