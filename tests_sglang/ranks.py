"""TP ranks as processes: the same call to all of them, and no wait without an end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DEADLINE_S = 60.0
START_DEADLINE_S = 100.0
"""Importing sglang takes most of it on a busy machine."""


class RankError(AssertionError):
    """A rank failed, died or did not answer in time; the message has every rank's stderr."""


class Ranks:
    """``size`` processes of rank_worker.py that form one gloo group over the loopback device."""

    def __init__(self, size: int, directory: Path) -> None:
        self.ended = False
        self._started = False
        self._logs = [directory / f"rank-{rank}.log" for rank in range(size)]
        self._processes = [
            self._spawn(rank, size, directory / "rendezvous", log) for rank, log in enumerate(self._logs)
        ]

    @staticmethod
    def _spawn(rank: int, size: int, rendezvous: Path, log: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(HERE / "rank_worker.py"), str(rank), str(size), str(rendezvous)]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        with log.open("wb") as stderr:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
            )

    def each(self, call: str, **args: Any) -> list[Any]:
        """Every rank's answer to the same call. Raises RankError, and then all ranks have ended."""
        limit = time.monotonic() + (DEADLINE_S if self._started else START_DEADLINE_S)
        try:
            for process in self._processes:
                process.stdin.write(json.dumps({"call": call, "args": args}).encode() + b"\n")
            answers = self._answers(limit)
        except (OSError, RankError) as error:
            self.end()
            raise RankError(f"{call}: {error}\n{self._stderr()}") from None
        self._started = True
        return answers

    def _answers(self, limit: float) -> list[Any]:
        """Whoever answers first is heard first: one rank's failure leaves the others hanging."""
        waiting = {process.stdout: rank for rank, process in enumerate(self._processes)}
        answers: dict[int, Any] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, limit - time.monotonic()))
            if not ready:
                raise RankError(f"no answer in time from ranks {sorted(waiting.values())}")
            for pipe in ready:
                rank = waiting.pop(pipe)
                line = pipe.readline()
                answer = json.loads(line) if line else {"error": "the process died"}
                if "error" in answer:
                    raise RankError(f"rank {rank}: {answer['error']}")
                answers[rank] = answer["result"]
        return [answers[rank] for rank in sorted(answers)]

    def _stderr(self) -> str:
        logs = [log.read_text(errors="replace")[-4000:] for log in self._logs]
        return "\n".join(f"stderr of rank {rank}:\n{log}" for rank, log in enumerate(logs))

    def end(self) -> None:
        """They hold nothing that needs an orderly end, and one that hangs would not have it."""
        self.ended = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            process.stdin.close()
            process.stdout.close()
