"""Room badly kept: never made, made of the wrong pages, or made under a reader's hands."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hicache_conformance.directory import DirectoryStorage
from hicache_conformance.mutants import mutant
from hicache_storage import Namespace


@mutant("capacity.stays_within_capacity")
class NeverEvicts(DirectoryStorage):
    """The directory grows until the disk is full (sglang#26670, vllm#52784)."""

    def evict(self, capacity: int) -> None:
        pass


@mutant("capacity.newest_pages_stay")
class EvictsTheNewest(DirectoryStorage):
    """Eviction begins at the wrong end."""

    def files(self) -> Iterator[tuple[int, int, Path]]:
        for used, nbytes, path in super().files():
            yield -used, nbytes, path


@mutant("capacity.used_pages_stay")
class FirstInFirstOut(DirectoryStorage):
    """Reading a page does not keep it."""

    def get(self, key: str) -> bytes | None:
        path = self.path(key)
        try:
            status = path.stat()
            value = super().get(key)
            os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
        except FileNotFoundError:
            return None
        return value


@mutant("capacity.pages_being_read_stay_whole")
class EvictsUnderTheReader(DirectoryStorage):
    """Room is made by emptying files first: a reader finds half a page (Mooncake#850)."""

    def evict(self, capacity: int) -> None:
        for _, nbytes, path in sorted(self.files())[:-40]:
            with path.open("r+b") as file:
                file.write(bytes(nbytes // 2))
        time.sleep(0.001)
        super().evict(capacity)


@mutant("capacity.an_object_larger_than_the_store")
class DiesWhenFull(DirectoryStorage):
    """An object that cannot fit is an exception that nobody has declared."""

    def set(self, key: str, value: memoryview) -> None:
        if self.capacity is not None and len(value) > self.capacity:
            raise OSError(28, "No space left on device")
        super().set(key, value)


@mutant("capacity.two_clients_share_the_bound")
class CountsOnlyItsOwn(DirectoryStorage):
    """Each client keeps its own pages within the capacity, and does not see the others'."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._mine: set[Path] = set()

    def publish(self, path: Path, value: memoryview) -> None:
        super().publish(path, value)
        self._mine.add(path)

    def files(self) -> Iterator[tuple[int, int, Path]]:
        return (found for found in super().files() if found[2] in self._mine)


@mutant("capacity.one_entry_that_cannot_be_removed")
class OneBadEntryWedgesIt(DirectoryStorage):
    """Eviction gives up at the first entry that it cannot remove (sglang#31485)."""

    def evict(self, capacity: int) -> None:
        found = sorted(self.files())
        total = sum(nbytes for _, nbytes, _ in found)
        for _, nbytes, path in found:
            if total <= capacity:
                return
            path.unlink(missing_ok=True)
            total -= nbytes
