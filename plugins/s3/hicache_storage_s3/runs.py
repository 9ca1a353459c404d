"""Run records: small objects that name pages which were stored one after the other.

After a batch is stored, one record with the names of its pages, and of those stored just before, is
put under a few of them: the first page of the batch, the pages whose keys happen to hash to a
multiple of ``ANCHOR_EVERY`` (anchors), and the last such page before the batch. So the record of an
anchor names the pages around it, however they were cut into batches. A reader computes from the
keys that it asks for which of them are anchors, and a few records answer for a whole prefix,
wherever it begins.

A record proves nothing by itself; ``lookup`` says when it is believed. A damaged one is no record:
it ends with a checksum.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

ANCHOR_EVERY = 32
"""One key in so many is an anchor: about 4 in a batch of 128."""

LEAST_NEW_PAGES = 16
"""A record is written when so many pages are new since the last one."""

MOST_PAGES = 256
MOST_ANCHORS = 4

REMEMBER_SECONDS = 600.0
"""How long a page that was stored may go into records to come; lookup allows for it."""

_CHECKSUM_NBYTES = 16


@dataclass(frozen=True, slots=True)
class Run:
    """Pages of one namespace, all of which were there when nothing newer than ``token`` was removed."""

    digest: str
    token: str
    names: frozenset[str]


def record_key(key: str) -> str:
    """Where the record anchored at ``key`` is stored. Page names never begin with a dot."""
    digest, _, name = key.partition("/")
    return f"{digest}/.runs/{name}"


def is_anchor(key: str) -> bool:
    """Whether records are put under ``key`` wherever it stands in a batch."""
    return xxhash.xxh3_64_intdigest(key.encode()) % ANCHOR_EVERY == 0


def anchors(keys: Sequence[str], most: int = MOST_ANCHORS) -> list[str]:
    """The first key and the anchors among the others: ``most`` at most, the first and the last one
    among them.
    """
    found = [key for key in keys[1:] if is_anchor(key)]
    room = most - 1
    if len(found) > room:
        step = (len(found) - 1) / max(1, room - 1)
        found = [found[round(i * step)] for i in range(room)]
    return [*keys[:1], *found]


def encode(run: Run) -> bytes:
    """The record's bytes."""
    body = json.dumps([run.digest, run.token, sorted(run.names)], separators=(",", ":")).encode()
    return body + xxhash.xxh3_64_hexdigest(body).encode()


def decode(raw: bytes) -> Run | None:
    """The record, or None when these bytes are not one as it was written."""
    body, checksum = raw[:-_CHECKSUM_NBYTES], raw[-_CHECKSUM_NBYTES:]
    if xxhash.xxh3_64_hexdigest(body).encode() != checksum:
        return None
    try:
        digest, token, names = json.loads(body)
        return Run(digest, token, frozenset(names))
    except (ValueError, TypeError):
        return None


class RecentPages:
    """The pages of one namespace stored last by this process. Thread-safe."""

    def __init__(self) -> None:
        self._pages: deque[tuple[float, str]] = deque(maxlen=MOST_PAGES)
        self._new: list[str] = []
        self._token: str | None = None
        self._lock = threading.Lock()

    def stored(self, keys: Sequence[str], token: str) -> tuple[Run, list[str]] | None:
        """Take note of pages stored since ``token`` was read; a run to record and its anchors, if due."""
        now = time.monotonic()
        with self._lock:
            if token != self._token:
                self._pages.clear()
                self._new.clear()
                self._token = token
            while self._pages and now - self._pages[0][0] > REMEMBER_SECONDS:
                self._pages.popleft()
            self._pages.extend((now, key) for key in keys)
            self._new.extend(keys)
            if len(self._new) < LEAST_NEW_PAGES:
                return None
            new, self._new = self._new, []
            named = [key for _, key in self._pages]
        digest = new[0].partition("/")[0]
        run = Run(digest, token, frozenset(key.partition("/")[2] for key in named))
        before = [key for key in named[: -len(new)] if is_anchor(key)]
        return run, [*anchors(new), *before[-1:]]
