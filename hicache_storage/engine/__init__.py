"""The reference tier engine: HiCache's three tiers without a model. Needs torch (``[engine]``)."""

from hicache_storage.engine.compute import Compute, Work
from hicache_storage.engine.decode import DecodeEngine, DecodeStats, Decoding
from hicache_storage.engine.engine import TierEngine
from hicache_storage.engine.layouts import LAYOUTS
from hicache_storage.engine.options import COPIED_BY, EngineOptions, resolve
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.prefill import Prefetch
from hicache_storage.engine.report import EngineStats, PrefillReport, Source
from hicache_storage.engine.shape import KVShape

__all__ = [
    "COPIED_BY",
    "LAYOUTS",
    "Compute",
    "DecodeEngine",
    "DecodeStats",
    "Decoding",
    "EngineOptions",
    "EngineStats",
    "KVShape",
    "Oracle",
    "Prefetch",
    "PrefillReport",
    "Source",
    "TierEngine",
    "Work",
    "page_hashes",
    "resolve",
]
