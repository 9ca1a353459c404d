"""Puts the namespace's digest in front of every key, so nobody above can forget it."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_storage.buffers import Page
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import ReadableBuffer, Status


class NamingLayer(Layer):
    """The keys above it are page names (SGLang's page hashes); below it, object keys.

    Every method that takes a key raises InvalidKeyError for a name that ``check_name`` refuses.
    """

    def get(self, key: str) -> ReadableBuffer | None:
        return self.inner.get(self.namespace.key(key))

    def exists(self, key: str) -> bool:
        return self.inner.exists(self.namespace.key(key))

    def set(self, key: str, value: memoryview) -> None:
        self.inner.set(self.namespace.key(key), value)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self.inner.batch_exists(self.namespace.keys(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self.inner.batch_get_into(self.namespace.keys(keys), pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self.inner.batch_set_from(self.namespace.keys(keys), pages)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(self.namespace.keys(keys))
