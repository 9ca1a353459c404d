"""A rank with an L3 of its own: the backend, seen through the rank's namespace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import BrokenPromiseError
from hicache_conformance.pages import GuardedPages
from hicache_storage import HiCacheStorage, Namespace

SHAPE = (512, 512)


def rank_namespace(base: Namespace, tp: int, tp_size: int, pp: int = 0, pp_size: int = 1) -> Namespace:
    """The keyspace of one rank: its heads and its layers."""
    axes = (("tp", tp, tp_size), ("pp", pp, pp_size))
    return replace(base, attention="mha", ranks=tuple(axis for axis in axes if axis[2] > 1))


class StoredRank:
    """Pages of one rank in ``storage``, whose keys are page names; contents are the rank's own."""

    def __init__(self, storage: HiCacheStorage, label: str, clock: random.Random) -> None:
        self.storage = storage
        self._label = label
        self._clock = clock
        self._memory = GuardedPages(1, SHAPE)
        storage.register_buffer(self._memory.region)

    def content(self, page_hash: str) -> bytes:
        """The bytes of this rank's part of the page."""
        return page_content(f"{self._label}/{page_hash}", sum(SHAPE))

    def store(self, hashes: Sequence[str]) -> int:
        """Store pages one by one; how many were stored."""
        stored = 0
        for page_hash in hashes:
            self._memory.write(0, self.content(page_hash))
            stored += bool(self.storage.batch_set_from([page_hash], self._memory.pages)[0])
        return stored

    def hit(self, hashes: Sequence[str]) -> int:
        found = self.storage.batch_exists(hashes)
        return next((i for i, there in enumerate(found) if not there), len(found))

    def read(self, page_hash: str) -> bool:
        """Raises BrokenPromiseError for a page that is served with wrong bytes."""
        self._memory.blank()
        status = self.storage.batch_get_into([page_hash], self._memory.pages)[0]
        if status and self._memory.content(0) != self.content(page_hash):
            raise BrokenPromiseError(f"rank {self._label} was served another page's bytes")
        return bool(status)

    def patience(self) -> int:
        return self._clock.choice((0, 1, 2, 4, 100, 100))

    def release(self) -> None:
        """Give the memory back."""
        self.storage.unregister_buffer(self._memory.region)
