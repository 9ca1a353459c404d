"""The storage SDK for SGLang HiCache: a contract in three methods, and what makes it safe to use.

Importing it loads neither torch nor sglang, and pydantic only once a storage is opened.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hicache_storage.buffers import Buffer, Page, page_nbytes
from hicache_storage.deadline import time_left
from hicache_storage.errors import (
    AccessDeniedError,
    BufferMismatchError,
    BusyError,
    CapacityError,
    ClosedError,
    CorruptError,
    DeadlineError,
    InvalidKeyError,
    RequestError,
    SettingsError,
    StorageError,
    UnavailableError,
    UnsupportedError,
)
from hicache_storage.namespace import Namespace
from hicache_storage.storage import BATCH_PAGES, Capabilities, HiCacheStorage, ReadableBuffer, Status

if TYPE_CHECKING:
    from hicache_storage.open import open_storage
    from hicache_storage.registry import find_backend, installed

__version__ = "0.1.0"

__all__ = [
    "BATCH_PAGES",
    "AccessDeniedError",
    "Buffer",
    "BufferMismatchError",
    "BusyError",
    "Capabilities",
    "CapacityError",
    "ClosedError",
    "CorruptError",
    "DeadlineError",
    "HiCacheStorage",
    "InvalidKeyError",
    "Namespace",
    "Page",
    "ReadableBuffer",
    "RequestError",
    "SettingsError",
    "Status",
    "StorageError",
    "UnavailableError",
    "UnsupportedError",
    "find_backend",
    "installed",
    "open_storage",
    "page_nbytes",
    "time_left",
]

_LAZY = {
    "find_backend": "hicache_storage.registry",
    "installed": "hicache_storage.registry",
    "open_storage": "hicache_storage.open",
}


def __getattr__(name: str) -> Any:
    """Load what needs pydantic or importlib.metadata only when it is asked for."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
