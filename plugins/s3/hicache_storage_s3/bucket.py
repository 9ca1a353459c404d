"""Removes pages: some, a namespace's, or the oldest.

Every removal ends by changing its namespace's token. One of many pages also begins by that, so that
nothing said until then is believed even should this process die half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import TypeVar

from hicache_storage_s3.client import LIST_PAGE, Client
from hicache_storage_s3.removals import TOKEN, Removals

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Stored:
    """One object of ours in the bucket, pages and run records alike."""

    path: str
    digest: str
    nbytes: int
    stored_at: datetime


@dataclass
class Removed:
    """What a removal came to."""

    objects: int = 0
    nbytes: int = 0


def delete(client: Client, removals: Removals, keys: Sequence[str]) -> None:
    """Remove these pages. Raises StorageError; some may be gone then."""
    if not keys:
        return
    try:
        client.delete(keys)
    finally:
        for digest in {key.partition("/")[0] for key in keys}:
            removals.change(digest)


def clear_namespace(client: Client, digest: str) -> Iterator[Stored]:
    """All objects of one namespace but its token. Raises StorageError."""
    return (found for found in stored(client, f"{digest}/") if not _is_token(found))


def stored(client: Client, prefix: str = "") -> Iterator[Stored]:
    """All objects whose key starts with ``prefix``. Raises StorageError."""
    start = len(client.path(""))
    for page in client.list(prefix):
        for meta in page:
            digest, slash, _ = meta["path"][start:].partition("/")
            if slash and not digest.startswith("."):
                yield Stored(meta["path"], digest, meta["size"], meta["last_modified"])


def older_than(client: Client, cutoff: datetime) -> Iterator[Stored]:
    """What was stored before ``cutoff``, tokens excepted."""
    return (found for found in stored(client) if found.stored_at < cutoff and not _is_token(found))


def oldest_over(client: Client, nbytes: int) -> list[Stored]:
    """What has to go, oldest first, for ``nbytes`` to be left. All names are in memory for that."""
    found = sorted((one for one in stored(client) if not _is_token(one)), key=lambda one: one.stored_at)
    excess = sum(one.nbytes for one in found) - nbytes
    going = []
    for one in found:
        if excess <= 0:
            break
        going.append(one)
        excess -= one.nbytes
    return going


def remove(
    client: Client,
    removals: Removals,
    objects: Iterable[Stored],
    progress: Callable[[Removed], None] | None = None,
) -> Removed:
    """Remove objects by multi-delete; lookups stop to believe in them after each request.

    Raises StorageError; what was removed until then is gone.
    """
    removed = Removed()
    for some in _chunks(objects, LIST_PAGE):
        with _announced(removals, {one.digest for one in some}):
            client.delete_paths([one.path for one in some])
        removed.objects += len(some)
        removed.nbytes += sum(one.nbytes for one in some)
        if progress is not None:
            progress(removed)
    return removed


@contextmanager
def _announced(removals: Removals, digests: set[str]) -> Iterator[None]:
    for digest in digests:
        removals.change(digest)
    try:
        yield
    finally:
        for digest in digests:
            removals.change(digest)


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _is_token(found: Stored) -> bool:
    return found.path.endswith(f"/{TOKEN}")
