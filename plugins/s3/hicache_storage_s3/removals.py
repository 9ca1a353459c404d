"""The removal token of a namespace: changed by every removal by a client of ours.

A token read before a page was seen, and still the same later, says that no client of ours has
removed any page in between. It is one small object a namespace, so checking it is one request,
whatever the number of pages.
"""

from __future__ import annotations

import re
import threading
import time
import uuid

from hicache_storage.errors import UnavailableError
from hicache_storage_s3.client import Client
from hicache_storage_s3.retry import Persistence

TOKEN = ".removed"  # noqa: S105 (no secret: the name of an object)
NOTHING_REMOVED = ""

_TOKEN = re.compile(r"[0-9a-f]{32}")


class Removals:
    """Reads and changes tokens; remembers the last one read. Thread-safe."""

    def __init__(self, client: Client, persistence: Persistence) -> None:
        self._client = client
        self._persistence = persistence
        self._known: dict[str, tuple[float, str]] = {}
        self._lock = threading.Lock()

    def read(self, digest: str) -> str:
        """The token now. Raises StorageError."""
        began = time.monotonic()
        found = self._persistence.call(lambda: self._client.read_small(f"{digest}/{TOKEN}"))
        token = NOTHING_REMOVED
        if found is not None:
            token = found[0].decode("ascii", "replace")
            if _TOKEN.fullmatch(token) is None:
                raise UnavailableError("the removal token is damaged")
        with self._lock:
            known = self._known.get(digest)
            if known is None or known[0] < began:
                self._known[digest] = (began, token)
        return token

    def known(self, digest: str) -> str | None:
        """The token when it was last read, None if it never was."""
        known = self._known.get(digest)
        return None if known is None else known[1]

    def change(self, digest: str) -> None:
        """Nobody believes any more what was said of this namespace's pages. Raises StorageError."""
        token = uuid.uuid4().hex
        self._persistence.call(lambda: self._client.put(f"{digest}/{TOKEN}", token.encode(), create=False))
        with self._lock:
            self._known.pop(digest, None)
