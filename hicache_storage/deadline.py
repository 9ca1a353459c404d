"""The ambient deadline: how much time the call in progress has left.

``deadline(seconds)`` sets it, ``time_left()`` reads it. It rides along with the thread instead of
being a parameter of every method, so three-method authors never see it and a bounded backend can
ask wherever it waits. Threads started inside do not inherit it; ``BatchPool`` hands it on.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ends_at: ContextVar[float | None] = ContextVar("hicache_deadline", default=None)


@contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Bound everything inside to ``seconds`` from now; a tighter outer deadline stays in force."""
    outer = _ends_at.get()
    ends_at = outer if seconds is None else time.monotonic() + seconds
    if outer is not None and ends_at is not None:
        ends_at = min(outer, ends_at)
    token = _ends_at.set(ends_at)
    try:
        yield
    finally:
        _ends_at.reset(token)


def time_left() -> float | None:
    """Seconds until the deadline, never below 0.0; None when there is none."""
    ends_at = _ends_at.get()
    return None if ends_at is None else max(0.0, ends_at - time.monotonic())
