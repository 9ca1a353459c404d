"""The reference store: the contract's three methods over a dict, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_storage import Capabilities, HiCacheStorage, Namespace


class ReferenceStorage(HiCacheStorage):
    """Pages in a dict. Two instances over one ``store`` are two clients of one store."""

    capabilities = Capabilities(delete=True, clear=True)

    def __init__(self, settings: Any, namespace: Namespace, store: dict[str, bytes] | None = None) -> None:
        super().__init__(settings, namespace)
        self.store: dict[str, bytes] = {} if store is None else store

    def get(self, key: str) -> bytes | None:
        return self.store.get(key)

    def exists(self, key: str) -> bool:
        return key in self.store

    def set(self, key: str, value: memoryview) -> None:
        self.store[key] = bytes(value)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.store.pop(key, None)

    def clear(self) -> None:
        mine = [key for key in list(self.store) if key.startswith(f"{self.namespace.digest}/")]
        self.delete(mine)
