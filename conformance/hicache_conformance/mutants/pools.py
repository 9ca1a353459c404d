"""Pools and engines: pages of one pool taken for another's, tiers that never fill."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_conformance.directory import DirectoryStorage
from hicache_conformance.mutants import mutant
from hicache_conformance.mutants.bytes_and_keys import _Renaming
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Page, Status


@mutant("hybrid.pools_have_pages_of_their_own", "hybrid.restorable_prefix_is_what_is_there")
class IgnoresThePoolSuffix(_Renaming):
    """Keys are cut at the first dot: every pool's page is the KV page (sglang#28258)."""

    def stored(self, key: str) -> str:
        return key.partition(".")[0]


@mutant("engine.every_layout_shape_and_policy")
class WritesButNeverReads(ReferenceStorage):
    """exists never hits, so L3 fills and nothing comes back (LMCache#3520, sglang#12092)."""

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)


@mutant("engine.pages_outlive_the_engine")
class ForgetsBetweenEngines(DirectoryStorage):
    """close removes what was stored: nothing outlives the engine."""

    def close(self) -> None:
        self.clear()


@mutant("engine.every_layout_shape_and_policy")
class BackupsFail(ReferenceStorage):
    """Every fourth page of a batch is not stored."""

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_set_from(keys, pages)
        return [Status.FAILED if i % 4 == 0 else status for i, status in enumerate(statuses)]
