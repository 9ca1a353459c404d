"""Lets calls in while a storage is open; closing waits for those that are inside.

Mooncake's client segfaults on any call before ``setup`` and after ``close`` (0.3.13.post1), so no
call may be made but inside an open gate.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hicache_storage import ClosedError


class Gate:
    """Safe from any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._pid = os.getpid()
        self.closing = threading.Event()
        """Set once ``shut`` was called: whoever waits inside should come out."""

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be inside. Raises ClosedError once the gate is shut, and in a forked child."""
        if self._pid != os.getpid():
            raise ClosedError("the storage was opened before this process was forked; open one here")
        with self._changed:
            if self.closing.is_set():
                raise ClosedError("the storage is closed")
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def shut(self) -> bool:
        """Let nobody in any more. False when it was shut before, and in a forked child."""
        if self._pid != os.getpid():
            return False
        with self._changed:
            ours = not self.closing.is_set()
            self.closing.set()
        return ours

    def emptied(self, timeout: float) -> bool:
        """Whether all who are inside come out within ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._inside == 0, timeout)
