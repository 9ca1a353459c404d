"""Pages that were seen in the store, for a while; the positive cache of lookups."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sighting:
    """That a page was there."""

    token: str
    """The namespace's removal token, read before the page was seen."""
    until: float
    """When it is forgotten, by the monotonic clock."""
    record: str
    """The run record that said so; empty when the store answered for the page itself."""


class Sightings:
    """At most ``limit`` pages for ``seconds`` each; the oldest are forgotten first. Thread-safe."""

    def __init__(self, seconds: float, limit: int) -> None:
        self._seconds = seconds
        self._limit = limit
        self._seen: OrderedDict[str, Sighting] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, keys: Iterable[str], token: str | None, record: str = "") -> None:
        """Take note of pages; without a token nothing would say when they are gone, so it is not."""
        if token is None or self._seconds == 0:
            return
        sighting = Sighting(token, time.monotonic() + self._seconds, record)
        with self._lock:
            for key in keys:
                self._seen[key] = sighting
                self._seen.move_to_end(key)
            while len(self._seen) > self._limit:
                self._seen.popitem(last=False)

    def find(self, key: str) -> Sighting | None:
        """The sighting of this page, unless it is forgotten; whether its token still holds is not asked."""
        found = self._seen.get(key)
        return found if found is not None and time.monotonic() < found.until else None

    def discard(self, keys: Iterable[str]) -> list[Sighting]:
        """Forget pages; what was known of them."""
        with self._lock:
            found = [self._seen.pop(key, None) for key in keys]
        return [sighting for sighting in found if sighting is not None]

    def __len__(self) -> int:
        return len(self._seen)
