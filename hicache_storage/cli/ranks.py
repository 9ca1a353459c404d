"""Commands on several ranks: the process that was started is rank 0, and starts the others like itself."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from hicache_storage.engine.ranks import Place, Ranks

RANK = "HICACHE_RANK"
MEETING = "HICACHE_RANKS_MEET_IN"
"""The environment that tells a process which rank it is, and where all meet."""

_TIMEOUT = 180.0
"""Seconds that a rank waits for another: more than a call of the storage may take."""

_END_SECONDS = 30.0


def own_rank() -> int:
    """Which rank this process is."""
    return int(os.environ.get(RANK, "0"))


@contextmanager
def meet(place: Place, environment: Mapping[str, str]) -> Iterator[Ranks]:
    """The ranks, all there. Rank 0 starts the others with its own command line and ``environment``.

    Ends the command with status 1, and what that rank said, when another one failed.
    """
    from hicache_storage.engine.ranks import GlooRanks, OneRank, RanksError

    if place.count == 1:
        yield OneRank()
        return
    if place.rank:
        directory = Path(os.environ[MEETING])
        _waits(directory, place.rank).touch()
        with GlooRanks(place, _meeting(directory), _TIMEOUT) as ranks:
            yield ranks
        return
    with tempfile.TemporaryDirectory(prefix="hicache-ranks-") as name, ExitStack() as stack:
        directory = Path(name)
        others = {
            rank: stack.enter_context(
                _started(_log(directory, rank), {**environment, RANK: str(rank), MEETING: str(directory)})
            )
            for rank in range(1, place.count)
        }
        failed = list(others)
        try:
            if _all_wait(directory, others):
                with GlooRanks(place, _meeting(directory), _TIMEOUT) as ranks:
                    yield ranks
                failed = [rank for rank, process in others.items() if process.wait(_END_SECONDS)]
        except (RanksError, subprocess.TimeoutExpired) as error:
            typer.echo(str(error), err=True)
        for rank in failed:
            said = _log(directory, rank).read_text(errors="replace")
            typer.echo(f"rank {rank} failed:\n{said[-2000:]}", err=True)
        if failed:
            raise typer.Exit(1)


def _all_wait(directory: Path, others: Mapping[int, subprocess.Popen[bytes]]) -> bool:
    """Whether all other ranks have come as far as to wait for this one; not when one ends before."""
    while not all(_waits(directory, rank).exists() for rank in others):
        if any(process.poll() is not None for process in others.values()):
            return False
        time.sleep(0.05)
    return True


@contextmanager
def _started(log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The same command as another rank; it has ended when the block has."""
    command = [sys.executable, "-c", "from hicache_storage.cli import main; main()", *sys.argv[1:]]
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - it is the command that is running
            command, env={**os.environ, **environment}, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _meeting(directory: Path) -> str:
    return (directory / "meeting").as_uri()


def _waits(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}-waits"


def _log(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.log"
