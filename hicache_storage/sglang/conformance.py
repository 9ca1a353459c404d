"""The way round SGLang's file backend to its files, by which hicache-conformance damages them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class FileCorruptor:
    """Reads and writes ``<directory>/<key><suffix>.bin``, as SGLang 0.5.10 to 0.5.23 name it."""

    def __init__(self, storage: Any) -> None:
        self._backend = storage.backend

    def read(self, key: str) -> bytes | None:
        """The raw object."""
        path = self._path(key)
        return path.read_bytes() if path.is_file() else None

    def write(self, key: str, raw: bytes) -> None:
        """Put these bytes where the object is."""
        self._path(key).write_bytes(raw)

    def _path(self, key: str) -> Path:
        name = self._backend._get_suffixed_key(key.replace("/", "-"))  # noqa: SLF001 (its file name)
        return Path(self._backend.file_path) / f"{name}.bin"
