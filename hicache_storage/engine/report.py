"""What a prefill did, and what an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Source(Enum):
    """Where a page of a request came from."""

    L1 = "L1"
    L2 = "L2"
    L3 = "L3"
    RECOMPUTED = "recomputed"


@dataclass(frozen=True, slots=True)
class PrefillReport:
    """One request: the source of each of its full pages, in order, and what that took.

    Tokens after the last full page are always computed and never cached, as in SGLang.
    """

    tokens: int
    page_size: int
    page_nbytes: int
    sources: tuple[Source, ...]
    seconds: dict[Source, float]
    """Time in copies, storage reads and computing. L3 is storage -> L2 -> L1; L1 takes none."""
    wrong_bytes: int
    """Bytes of the request's pages in L1 that are not what the oracle says. 0 or something lied."""

    def pages(self, source: Source) -> int:
        """Pages that came from ``source``."""
        return self.sources.count(source)

    def tokens_from(self, source: Source) -> int:
        """Tokens that came from ``source``; the last, partial page counts as recomputed."""
        partial = self.tokens - len(self.sources) * self.page_size if source is Source.RECOMPUTED else 0
        return self.pages(source) * self.page_size + partial

    def nbytes(self, source: Source) -> int:
        """Bytes of KV that came from ``source``."""
        return self.pages(source) * self.page_nbytes

    @property
    def hit_tokens(self) -> int:
        """Tokens that did not have to be computed."""
        return self.tokens - self.tokens_from(Source.RECOMPUTED)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine was opened; all but ``storage_errors`` are pages."""

    l1_resident: int
    l2_resident: int
    """Slots of L2 in use, those of reads that are still under way included."""
    l1_evicted: int
    l2_evicted: int
    copied_to_l2: int
    forgotten: int
    """Left L1 without ever having gone further: the write policy did not want that, or there was no room."""
    prefetched: int
    """Read from L3 and used."""
    prefetch_limited: int
    """Not asked of L3, since prefetches of waiting requests held their share of L2; a request that has
    waited asks again when it runs."""
    backed_up: int
    backup_failed: int
    """The storage did not take them, or was not asked any more; they stay in L2 while there is room."""
    dropped: int
    """Lost to L3 under pressure: left L2 without a backup, or never found room in L2."""
    storage_errors: int
    """Calls of the storage that raised."""


@dataclass(slots=True)
class Counts:
    """Pages, since the engine was opened; see EngineStats."""

    l1_evicted: int = 0
    l2_evicted: int = 0
    copied_to_l2: int = 0
    forgotten: int = 0
    prefetched: int = 0
    prefetch_limited: int = 0
    backed_up: int = 0
    backup_failed: int = 0
    dropped: int = 0
