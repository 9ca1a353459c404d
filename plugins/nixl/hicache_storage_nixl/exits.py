"""Lets a process end while a call into NIXL does not return, as when its store hangs.

At exit the destructors of NIXL and of the clients in it call such a call off; it returns into an
interpreter that is gone, and the process aborts instead of ending with its status. So when a call is
still inside then, those destructors do not run: the process ends as soon as Python has.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_lock = threading.Lock()
_inside: dict[int, Any] = {}


@contextmanager
def inside(agent: Any) -> Iterator[None]:
    """To be held around a call that blocks in this ``nixl_agent``."""
    me = threading.get_ident()
    with _lock:
        _inside[me] = agent
    try:
        yield
    finally:
        with _lock:
            del _inside[me]


@atexit.register
def _leave() -> None:
    with _lock:
        stuck = list(_inside.values())
    if not stuck:
        return
    for agent in stuck:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent.agent))  # never destroyed
    libc = ctypes.CDLL(None)
    # on_exit(3) hands on the exit status; what is registered last runs first
    libc.on_exit(libc._exit, None)  # noqa: SLF001 (the C function of this name)
