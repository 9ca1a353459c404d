"""Ways round a backend to what it has stored: how the suite damages objects.

A hook for a backend is a callable that takes an open instance and returns a ``Corruptor``. It is
found as the entry point of the backend's name in the group ``hicache_conformance.corruptors``, or
as the class attribute ``conformance_corruptor`` of the backend. Without one the suite damages
objects through the contract itself: read, change, delete, set.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Protocol, TypeAlias

from hicache_storage import HiCacheStorage

GROUP = "hicache_conformance.corruptors"
ATTRIBUTE = "conformance_corruptor"


class Corruptor(Protocol):
    """Reads and writes stored objects behind the backend's back."""

    def read(self, key: str) -> bytes | None:
        """All the bytes of the stored object, or None when there is none."""

    def write(self, key: str, raw: bytes) -> None:
        """Put exactly these bytes in the object's place, whatever the backend thinks of it."""


class Pinning(Protocol):
    """What a corruptor may offer on top: making an object impossible to remove."""

    def pin(self, key: str) -> None:
        """From now on the backend cannot remove this object; reading it may fail too."""

    def unpin(self, key: str) -> None:
        """Take ``pin`` back, so that the store can be cleaned up."""


MakeCorruptor: TypeAlias = Callable[[Any], Corruptor]


class ContractCorruptor:
    """Damages objects with the backend's own methods: any bytes are a fine object to a backend."""

    def __init__(self, storage: HiCacheStorage) -> None:
        self._storage = storage

    def read(self, key: str) -> bytes | None:
        """The object as ``get`` returns it."""
        raw = self._storage.get(key)
        return None if raw is None else bytes(raw)

    def write(self, key: str, raw: bytes) -> None:
        """Delete where that is possible (``set`` on a present key may do nothing), then set."""
        if self._storage.capabilities.delete:
            self._storage.delete([key])
        self._storage.set(key, memoryview(raw))


def corruptor_for(backend: str, storage: HiCacheStorage) -> Corruptor:
    """The hook of this backend, or one that works through the contract."""
    for point in entry_points(group=GROUP):
        if point.name == backend:
            make: MakeCorruptor = point.load()
            return make(storage)
    hook: MakeCorruptor | None = getattr(type(storage), ATTRIBUTE, None)
    return ContractCorruptor(storage) if hook is None else hook(storage)
