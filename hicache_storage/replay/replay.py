"""Drives the engine with a request stream, one row for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_storage.engine.engine import TierEngine
from hicache_storage.engine.prefill import Prefetch
from hicache_storage.engine.report import PrefillReport, Source
from hicache_storage.replay.bound import UpperBound
from hicache_storage.replay.request import Request


@dataclass(frozen=True, slots=True)
class Row:
    """One request: what the engine did, next to the bound."""

    index: int
    arrival_ms: int
    report: PrefillReport
    bound_tokens: int
    """Tokens that an unlimited cache would have had."""


@dataclass(slots=True)
class Summary:
    """Sums over rows."""

    requests: int = 0
    tokens: int = 0
    hit_tokens: int = 0
    bound_tokens: int = 0
    wrong_bytes: int = 0
    pages: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    tokens_from: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    nbytes: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    seconds: dict[Source, float] = field(default_factory=lambda: dict.fromkeys(Source, 0.0))

    def add(self, row: Row) -> None:
        """Count one more request."""
        report = row.report
        self.requests += 1
        self.tokens += report.tokens
        self.hit_tokens += report.hit_tokens
        self.bound_tokens += row.bound_tokens
        self.wrong_bytes += report.wrong_bytes
        for source in Source:
            self.pages[source] += report.pages(source)
            self.tokens_from[source] += report.tokens_from(source)
            self.nbytes[source] += report.nbytes(source)
            self.seconds[source] += report.seconds[source]

    @property
    def hit_rate(self) -> float:
        """Share of the tokens that did not have to be computed."""
        return self.hit_tokens / self.tokens if self.tokens else 0.0

    @property
    def bound(self) -> float:
        """The hit rate of an unlimited cache over the same requests."""
        return self.bound_tokens / self.tokens if self.tokens else 0.0


def replay(engine: TierEngine, requests: Iterable[Request], queue: int = 0) -> Iterator[Row]:
    """Prefill the requests in order.

    ``queue`` requests wait while others run, and their prefetches go on meanwhile: what best_effort
    lives by. Raises ValueError for a request that does not fit in L1.
    """
    bound = UpperBound(engine.page_size)
    waiting: deque[tuple[int, Request, Sequence[int], Prefetch | None]] = deque()

    def run() -> Row:
        index, request, tokens, prefetch = waiting.popleft()
        return Row(index, request.arrival_ms, engine.prefill(tokens, prefetch), bound.add(tokens))

    for index, request in enumerate(requests):
        tokens = request.tokens()
        waiting.append((index, request, tokens, engine.prefetch(tokens) if queue else None))
        if len(waiting) > queue:
            yield run()
    while waiting:
        yield run()
