"""HiCache pages in Mooncake Store: memory and SSDs of many machines as one L3."""

from hicache_storage_mooncake.settings import MooncakeSettings
from hicache_storage_mooncake.storage import MooncakeStorage

__version__ = "0.1.0"

__all__ = ["MooncakeSettings", "MooncakeStorage"]
