"""HiCache pages through NIXL: files, GPUDirect Storage, 3FS and object stores by one library."""

from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.storage import NixlStorage

__version__ = "0.1.0"

__all__ = ["NixlSettings", "NixlStorage"]
