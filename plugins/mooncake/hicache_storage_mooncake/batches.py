"""Batches in the form that Mooncake takes: addresses and sizes, each key once, not too many buffers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_storage import Page, Status, page_nbytes
from hicache_storage.buffers import copy

MAX_BUFFERS = 16_384
"""Most buffers in one call of Mooncake; several threads together stay below its queue of 65,535."""


def scatter_lists(pages: Sequence[Page]) -> tuple[list[list[int]], list[list[int]]]:
    """Addresses and sizes of the pages' buffers, without the empty ones."""
    kept = [[buffer for buffer in page if buffer.nbytes] for page in pages]
    return [[b.address for b in page] for page in kept], [[b.nbytes for b in page] for page in kept]


def parts(sizes: Sequence[Sequence[int]]) -> Iterator[slice]:
    """Slices of a batch with at most MAX_BUFFERS buffers each: one, for all but very scattered pages."""
    start, buffers = 0, 0
    for i, page in enumerate(sizes):
        if i > start and buffers + len(page) > MAX_BUFFERS:
            yield slice(start, i)
            start, buffers = i, 0
        buffers += len(page)
    if start < len(sizes):
        yield slice(start, len(sizes))


def apart(keys: Sequence[str]) -> tuple[dict[str, int], list[int]]:
    """Where each key stands first, and where it stands again.

    Mooncake fills only one of several pages under one key, and says OK for all (0.3.13.post1).
    """
    first: dict[str, int] = {}
    twins = [i for i, key in enumerate(keys) if first.setdefault(key, i) != i]
    return first, twins


def copied(source: Page, target: Page, status: Status) -> Status:
    """Give the twin of a page that was read its bytes."""
    if status and page_nbytes(source) != page_nbytes(target):
        return Status.CORRUPT
    if status:
        copy(source, target)
    return status
