"""HiCache pages in object storage: anything that speaks the S3 API."""

from hicache_storage_s3.settings import S3Settings
from hicache_storage_s3.storage import S3Storage

__version__ = "0.1.0"

__all__ = ["S3Settings", "S3Storage"]
