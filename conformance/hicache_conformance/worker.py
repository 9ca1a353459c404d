"""A second process on the store: reads commands as JSON lines, answers as JSON lines.

Run by ``OtherProcess``. The first line opens the backend, each further line is one command. Page
contents are those of ``page_content``, so only names and verdicts travel.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from hicache_conformance.oracle import page_content
from hicache_conformance.pages import GuardedPages
from hicache_conformance.target import Target
from hicache_storage import HiCacheStorage, Namespace, UnsupportedError


class Worker:
    """The commands; each is a method that answers with something JSON can carry."""

    def __init__(self, job: dict[str, Any], answers: TextIO) -> None:
        self._answers = answers
        self._job = job
        self.storage = self._open()

    def names(self, names: Sequence[str]) -> list[str]:
        """The object keys of these page names."""
        return self.storage.namespace.keys(names)

    def set(self, names: list[str], buffers: list[int]) -> list[str]:
        """Store pages of this shape; the status of each."""
        return _stored(self.storage, names, buffers)

    def get(self, names: list[str], buffers: list[int]) -> list[str]:
        """Read pages; the status of each, "wrong" for one that is OK with other bytes."""
        return _read(self.storage, names, buffers)

    def exists(self, names: list[str]) -> list[bool]:
        """Whether each page is there."""
        return self.storage.batch_exists(self.names(names))

    def clear(self) -> None:
        """Clear the namespace."""
        self.storage.clear()

    def stream(self, prefix: str, buffers: list[int], batch: int) -> None:
        """Store pages ``prefix-0``, ``prefix-1``, ... until killed; each acknowledged name is a line."""
        number = 0
        while True:
            names = [f"{prefix}-{number + i}" for i in range(batch)]
            statuses = self.set(names, buffers)
            for name, status in zip(names, statuses, strict=True):
                if status == "ok":
                    self.answer(name)
            number += batch

    def fork(self, names: list[str], buffers: list[int], seconds: float) -> dict[str, Any]:
        """Fork with the storage open; the child works on a storage of its own, then the parent goes on.

        Answers with what the child stored and read, or why it cannot open the store, and with what the
        parent could store and read afterwards.
        """
        half = len(names) // 2
        before = self.set(names[:half], buffers)
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(ours)
            self._in_child(names[:half], buffers, theirs)
        os.close(theirs)
        status = _wait(child, seconds)
        with os.fdopen(ours) as pipe:
            said = pipe.read()
        after = self.set(names[half:], buffers)
        return {
            "before": before,
            "child": json.loads(said) if said else f"no answer, wait status {status}",
            "after": after,
            "read": self.get(names[half:], buffers),
        }

    def _in_child(self, names: list[str], buffers: list[int], out: int) -> None:
        """Never returns: what the parent's threads would do at exit is not the child's business."""
        try:
            said: object
            try:
                with self._open() as storage:
                    stored = _stored(storage, names, buffers)
                    said = [stored, _read(storage, names, buffers)]
            except UnsupportedError as refusal:
                said = {"unsupported": str(refusal)}
            os.write(out, json.dumps(said).encode())
        finally:
            os._exit(0)

    def _open(self) -> HiCacheStorage:
        given = self._job["namespace"]
        ranks = tuple((axis, rank, size) for axis, rank, size in given["ranks"])
        namespace = Namespace(**{**given, "layers": tuple(given["layers"]), "ranks": ranks})
        target = Target(self._job["backend"], self._job["table"])
        return target.open(Path(self._job["tmp"]), namespace, **self._job["own"])

    def answer(self, value: object) -> None:
        """Send one line."""
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()


def _stored(storage: HiCacheStorage, names: Sequence[str], buffers: Sequence[int]) -> list[str]:
    memory = GuardedPages(len(names), buffers)
    for number, name in enumerate(names):
        memory.write(number, page_content(name, sum(buffers)))
    storage.register_buffer(memory.region)
    statuses = storage.batch_set_from(storage.namespace.keys(names), memory.pages)
    storage.unregister_buffer(memory.region)
    return [status.value for status in statuses]


def _read(storage: HiCacheStorage, names: Sequence[str], buffers: Sequence[int]) -> list[str]:
    memory = GuardedPages(len(names), buffers)
    memory.blank()
    storage.register_buffer(memory.region)
    statuses = storage.batch_get_into(storage.namespace.keys(names), memory.pages)
    storage.unregister_buffer(memory.region)
    return [
        "wrong" if status and memory.content(number) != page_content(name, sum(buffers)) else status.value
        for number, (name, status) in enumerate(zip(names, statuses, strict=True))
    ]


def _wait(child: int, seconds: float) -> str:
    """How the child ended; it is killed when it takes longer than ``seconds``."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return str(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return f"hung for {seconds} s"


def main() -> None:
    """Serve commands until the input ends."""
    # what a backend prints must not end up among the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.loads(sys.stdin.readline())
    worker = Worker(job, answers)
    worker.answer("ready")
    for line in sys.stdin:
        command, arguments = json.loads(line)
        worker.answer(getattr(worker, command)(**arguments))
    worker.storage.close()


if __name__ == "__main__":
    main()
