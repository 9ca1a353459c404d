"""The way round a backend to the files of its directory, by which hicache-conformance damages them."""

from __future__ import annotations

import zlib
from pathlib import Path

from hicache_storage import HiCacheStorage


class DirectoryCorruptor:
    """Reads and writes the object of a key as another program would: without the backend.

    For any backend whose setting ``root`` names the directory.
    """

    def __init__(self, storage: HiCacheStorage) -> None:
        self._root = Path(storage.settings.root)

    def read(self, key: str) -> bytes | None:
        """The raw object, header included."""
        path = self._path(key)
        return path.read_bytes() if path.is_file() else None

    def write(self, key: str, raw: bytes) -> None:
        """Put these bytes where the object is."""
        self._path(key).write_bytes(raw)

    def pin(self, key: str) -> None:
        """Put something in the object's place that eviction cannot remove."""
        self._path(key).unlink()
        self._path(key).mkdir()

    def unpin(self, key: str) -> None:
        """Take it away again."""
        self._path(key).rmdir()

    def _path(self, key: str) -> Path:
        namespace, _, name = key.partition("/")
        return self._root / namespace / f"{zlib.crc32(name.encode()) & 0xFF:02x}" / name
