"""HiCache pages as files in a directory tree: the embedded backend, and one to copy from."""

from hicache_storage_file.settings import FileSettings
from hicache_storage_file.storage import FileStorage

__version__ = "0.1.0"

__all__ = ["FileSettings", "FileStorage"]
