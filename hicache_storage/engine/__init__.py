"""The reference tier engine: HiCache's three tiers without a model. Needs torch (``[engine]``)."""

from hicache_storage.engine.engine import Prefetch, TierEngine
from hicache_storage.engine.layouts import LAYOUTS
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.report import EngineStats, PrefillReport, Source
from hicache_storage.engine.shape import KVShape

__all__ = [
    "LAYOUTS",
    "EngineStats",
    "KVShape",
    "Oracle",
    "Prefetch",
    "PrefillReport",
    "Source",
    "TierEngine",
    "page_hashes",
]
