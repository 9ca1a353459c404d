"""The third reference store: files in a directory, shared by processes, surviving them, bounded."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from hicache_storage import Capabilities, HiCacheStorage, Namespace, UnavailableError


class DirectorySettings(BaseModel):
    """Where the files are, and how many bytes they may take (None: any number)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path
    capacity: int | None = None


class DirectoryCorruptor:
    """The way round it: its files."""

    def __init__(self, storage: DirectoryStorage) -> None:
        self._storage = storage

    def read(self, key: str) -> bytes | None:
        path = self._storage.path(key)
        return path.read_bytes() if path.exists() else None

    def write(self, key: str, raw: bytes) -> None:
        self._storage.path(key).write_bytes(raw)

    def pin(self, key: str) -> None:
        """A directory in the file's place: unlinking it fails."""
        path = self._storage.path(key)
        path.unlink(missing_ok=True)
        path.mkdir()

    def unpin(self, key: str) -> None:
        self._storage.path(key).rmdir()


class DirectoryStorage(HiCacheStorage):
    """One file a page, written beside its place and renamed into it; least recently used go first."""

    Settings = DirectorySettings
    capabilities = Capabilities(persistent=True, shared=True, delete=True, clear=True, evicts=True)
    conformance_corruptor = DirectoryCorruptor

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self.root: Path = settings.root
        self.capacity: int | None = settings.capacity
        self.lock = threading.Lock()

    def path(self, key: str) -> Path:
        """The file of this key."""
        return self.root / key

    def get(self, key: str) -> bytes | None:
        try:
            value = self.path(key).read_bytes()
            os.utime(self.path(key))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnavailableError(str(error)) from error
        return value

    def exists(self, key: str) -> bool:
        return self.path(key).is_file()

    def set(self, key: str, value: memoryview) -> None:
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.publish(path, value)
        except OSError as error:
            raise UnavailableError(str(error)) from error
        if self.capacity is not None:
            self.evict(self.capacity)

    def publish(self, path: Path, value: memoryview) -> None:
        """Write the file so that it is there as a whole or not at all."""
        beside = path.with_name(f".{uuid.uuid4().hex}")
        beside.write_bytes(value)
        beside.rename(path)

    def evict(self, capacity: int) -> None:
        """Remove files, least recently used first, until they take ``capacity`` bytes at most."""
        with self.lock:
            found = sorted(self.files())
            total = sum(nbytes for _, nbytes, _ in found)
            for _, nbytes, path in found:
                if total <= capacity:
                    return
                try:
                    path.unlink()
                except FileNotFoundError:
                    pass
                except OSError:
                    continue  # one that cannot be removed must not keep the others
                total -= nbytes

    def files(self) -> Iterator[tuple[int, int, Path]]:
        """Last use in ns, size in bytes and path of every page of every namespace."""
        for path in self.root.glob("*/[!.]*"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue
            yield status.st_mtime_ns, status.st_size, path

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.path(key).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self.root / self.namespace.digest, ignore_errors=True)
