"""The most that any prefix cache could save of a stream: every page computed so far is still there."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_storage.engine.page_hash import page_hashes


class UpperBound:
    """Feeds on requests in order; hits are whole pages of an unbroken prefix, in tokens."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._seen: set[str] = set()

    def add(self, tokens: Sequence[int]) -> int:
        """Tokens of this request that an unlimited cache has; then it has all its full pages."""
        hashes = page_hashes(tokens, self._page_size)
        # a page hash stands for the whole prefix, so the first unknown one ends the hits
        hits = next((index for index, page in enumerate(hashes) if page not in self._seen), len(hashes))
        self._seen.update(hashes[hits:])
        return hits * self._page_size
