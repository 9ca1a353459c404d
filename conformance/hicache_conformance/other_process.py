"""Another process that works on the same store, and can be killed."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hicache_conformance.history import History
from hicache_conformance.outcomes import BrokenPromiseError
from hicache_conformance.target import Target
from hicache_storage import Namespace

ANSWER_SECONDS = 20.0


class OtherProcess:
    """A ``worker`` process with the target open; every wait is bounded."""

    def __init__(
        self, target: Target, tmp: Path, namespace: Namespace, history: History, own: dict[str, Any]
    ) -> None:
        self._history = history
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hicache_conformance.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="conformance-worker", daemon=True)
        self._reader.start()
        history.note(f"process {self._process.pid} opens the store")
        self._send(
            {
                "backend": target.backend,
                "table": dict(target.table),
                "tmp": str(tmp),
                "own": own,
                "namespace": asdict(namespace),
            }
        )
        self.answer()

    def call(self, command: str, **arguments: Any) -> Any:
        """Run a command of ``Worker`` there and return its answer."""
        self.start(command, **arguments)
        answer = self.answer()
        self._history.note(f"process {self._process.pid}: {command} -> {str(answer)[:160]}")
        return answer

    def start(self, command: str, **arguments: Any) -> None:
        """Begin a command; answers come by ``answer``."""
        self._send([command, arguments])

    def answer(self) -> Any:
        """The next line it says. Raises BrokenPromiseError when none comes."""
        try:
            line = self._lines.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise BrokenPromiseError(f"the other process said nothing for {ANSWER_SECONDS} s") from None
        if not line:
            self._errors.seek(0)
            tail = self._errors.read()[-2000:]
            raise BrokenPromiseError(f"the other process ended unasked:\n{tail}")
        return json.loads(line)

    def kill(self) -> list[Any]:
        """Kill it as a power switch would (SIGKILL); what it had said by then."""
        self._process.kill()
        self._process.wait()
        self._reader.join()
        self._history.note(f"process {self._process.pid} is killed")
        said = []
        while not self._lines.empty():
            if line := self._lines.get():
                said.append(json.loads(line))
        return said

    def close(self) -> None:
        """End it by the end of its input; killed when that does not help."""
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it may be gone already
                self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _send(self, value: object) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(value, default=str) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the next answer() says why

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.endswith("\n"):
                self._lines.put(line)
        self._lines.put("")
