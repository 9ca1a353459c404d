"""How the conformance suite damages objects of this backend; no part of its use."""

from __future__ import annotations

from hicache_storage import HiCacheStorage


class MooncakeCorruptor:
    """Writes through the contract. An object cut down to nothing is removed: Mooncake holds none."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage

    def read(self, key: str) -> bytes | None:
        """The object as ``get`` returns it; an empty one for an object that is not there."""
        raw = self._storage.get(key)
        return b"" if raw is None else bytes(raw)

    def write(self, key: str, raw: bytes) -> None:
        """Put exactly these bytes in the object's place."""
        self._storage.delete([key])
        if raw:
            self._storage.set(key, memoryview(raw))
