"""A request of a stream: which tokens it has, without carrying them around."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt made of segments; requests share a prefix where their leading segments are equal."""

    arrival_ms: int
    segments: tuple[tuple[int, int], ...]
    """(id, tokens) of each segment. Equal ids mean equal tokens."""

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return sum(count for _, count in self.segments)

    def tokens(self) -> array[int]:
        """The prompt: 32-bit token ids, a function of the segments alone."""
        tokens = array("I")
        tokens.frombytes(b"".join([_segment(*segment) for segment in self.segments]))
        return tokens


@lru_cache(maxsize=1024)
def _segment(segment_id: int, count: int) -> bytes:
    return hashlib.shake_128(str(segment_id).encode()).digest(4 * count)
