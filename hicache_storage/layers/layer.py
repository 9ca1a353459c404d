"""A layer: a storage in front of another one, changing one thing about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from hicache_storage.buffers import Buffer, Page
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status

L = TypeVar("L", bound=HiCacheStorage)


def find_layer(storage: HiCacheStorage, kind: type[L]) -> L | None:
    """The layer (or backend) of this kind in a composed storage, None when it is switched off."""
    while not isinstance(storage, kind):
        if not isinstance(storage, Layer):
            return None
        storage = storage.inner
    return storage


class Layer(HiCacheStorage):
    """Passes every call to ``inner``; a subclass overrides the calls that it is about."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner.settings, inner.namespace)
        self.inner = inner
        # a layer may change pages after the backend's hook has seen them
        self.capabilities = replace(inner.capabilities, page_hook=False)

    def get(self, key: str) -> ReadableBuffer | None:
        return self.inner.get(key)

    def exists(self, key: str) -> bool:
        return self.inner.exists(key)

    def set(self, key: str, value: memoryview) -> None:
        self.inner.set(key, value)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self.inner.batch_exists(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self.inner.batch_get_into(keys, pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self.inner.batch_set_from(keys, pages)

    def register_buffer(self, buffer: Buffer) -> None:
        self.inner.register_buffer(buffer)

    def unregister_buffer(self, buffer: Buffer) -> None:
        self.inner.unregister_buffer(buffer)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(keys)

    def clear(self) -> None:
        self.inner.clear()

    def describe(self) -> dict[str, str]:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()
