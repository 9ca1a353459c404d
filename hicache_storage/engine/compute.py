"""What stands behind L1: whatever computes the pages that no tier has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hicache_storage.engine.loading import LOADED, Loading


@dataclass(frozen=True, slots=True)
class Work:
    """One request at the moment when all of its full pages have a slot in L1."""

    tokens: Sequence[int]
    """All of its tokens; the last ones may fill no page."""
    hashes: Sequence[str]
    """Of its full pages."""
    slots: Sequence[int]
    """Of its full pages in L1."""
    cached: int
    """So many leading pages came from a tier; the others are to be computed."""
    loading: Loading = LOADED
    """Cached pages may still be on their way: wait for a layer before reading it."""


class Compute(Protocol):
    """Fills L1, and says whether what is there is right. One thread at a time.

    ``pages`` is the L1 pool as ``PagePool.pages`` sees it: (page, kv, layer, token, head, word),
    contiguous along the last three axes.
    """

    def compute(self, pages: torch.Tensor, work: Work) -> None:
        """Write the KV of the pages that are not cached into their slots.

        Returns when copies enqueued after the current stream's work may read them.
        """

    def check(self, pages: torch.Tensor, work: Work) -> int:
        """How many bytes of the request's pages, all loaded by now, are not what they must be; 0 is right."""
