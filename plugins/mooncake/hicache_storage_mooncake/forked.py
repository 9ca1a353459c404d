"""Mooncake in a forked process: it can neither be used nor ended there, so it is left alone.

Its threads stay in the parent. In the child every call waits for them for ever, ``setup`` of a new
client too, and what the library does at the end of a process is a segmentation fault
(0.3.13.post1).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from hicache_storage import UnsupportedError

_stores: list[Any] = []
_started_in: list[int] = []


def check() -> None:
    """Raise UnsupportedError in a process that was forked from one that has used Mooncake."""
    if inherited():
        raise UnsupportedError(
            "Mooncake hangs in a process forked from one that has used it: spawn this process instead"
        )


def inherited() -> bool:
    """Whether Mooncake's threads are in another process, which this one was forked from."""
    return bool(_started_in) and _started_in[0] != os.getpid()


def started(store: Any) -> None:
    """Note that ``store`` has threads, in this process."""
    _stores.append(store)
    if not _started_in:
        _started_in.append(os.getpid())
        os.register_at_fork(after_in_child=_leave_alone)


def ended(store: Any) -> None:
    """Note that ``store`` is closed; whoever drops it last ends its threads."""
    _stores.remove(store)


def _leave_alone() -> None:
    """Destroy no store here, and end this process without what C registered to run at its end.

    Handlers of C run last in, first out, so ``_exit`` comes before Mooncake's; Python has ended by then.
    """
    for store in _stores:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(store))
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # noqa: SLF001 (that is its name in C)
