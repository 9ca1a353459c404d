"""The reference tier engine: HiCache's three tiers in a form that can be read. Needs torch (``[engine]``)."""

from hicache_storage.engine.compute import Compute, Work
from hicache_storage.engine.decode import DecodeEngine, DecodeStats, Decoding
from hicache_storage.engine.engine import TierEngine
from hicache_storage.engine.layouts import LAYOUTS
from hicache_storage.engine.options import COPIED_BY, EngineOptions, resolve
from hicache_storage.engine.oracle import Oracle
from hicache_storage.engine.page_hash import page_hashes
from hicache_storage.engine.prefill import Prefetch
from hicache_storage.engine.ranks import GlooRanks, Place, RanksError
from hicache_storage.engine.report import EngineStats, PrefillReport, Source
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.side_pools import SidePool

__all__ = [
    "COPIED_BY",
    "LAYOUTS",
    "Compute",
    "DecodeEngine",
    "DecodeStats",
    "Decoding",
    "EngineOptions",
    "EngineStats",
    "GlooRanks",
    "KVShape",
    "Oracle",
    "Place",
    "Prefetch",
    "PrefillReport",
    "RanksError",
    "Shard",
    "SidePool",
    "Source",
    "TierEngine",
    "Work",
    "page_hashes",
    "resolve",
]
