"""What is to be done with each page of a batch at the moment when it is in the processor's cache.

A checksum reads a page at several times the speed while the page is warm: right after it was read
from the store, or right before it is written. Only the backend knows that moment. A backend that
declares ``Capabilities.page_hook`` asks for ``page_work()`` in the thread of its caller, and runs it
with the page's number in the batch: under the page's lease, after the page has arrived, or before
its bytes are first read. Like the deadline it is ambient, so no signature carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeAlias

PageWork: TypeAlias = Callable[[int], None]

_work: ContextVar[PageWork | None] = ContextVar("hicache_page_work", default=None)


@contextmanager
def per_page(work: PageWork) -> Iterator[None]:
    """Have ``work(i)`` run for the pages of the one batch call made inside, by several threads.

    Not for pages that fail, and not for pages to store that are there already.
    """
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def page_work() -> PageWork:
    """What the caller wants done with each page; does nothing when he wants nothing."""
    return _work.get() or _nothing


def _nothing(_: int) -> None:
    pass
