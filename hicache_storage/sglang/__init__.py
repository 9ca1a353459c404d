"""SGLang on both sides: our backends under its interface, its backends under our contract.

SGLang loads ``HiCacheBackend`` from here by name; nothing of torch or sglang is imported before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hicache_storage.sglang.backend import HiCacheBackend

__all__ = ["HiCacheBackend"]


def __getattr__(name: str) -> Any:
    """Import the adapter, and sglang with it, when SGLang asks for it."""
    if name == "HiCacheBackend":
        from hicache_storage.sglang.backend import HiCacheBackend

        return HiCacheBackend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
