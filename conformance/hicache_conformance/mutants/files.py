"""Files written carelessly: torn, lost, locked, or in a place that only their writer knows."""

from __future__ import annotations

import os
import threading
import time
import uuid
from pathlib import Path
from typing import Any, ClassVar

from hicache_conformance.directory import DirectoryStorage
from hicache_conformance.mutants import mutant
from hicache_storage import Namespace, UnavailableError


@mutant("contract.same_key_writers")
class OneTemporaryName(DirectoryStorage):
    """Two writers of a key share its temporary file: one renames it away under the other."""

    def publish(self, path: Path, value: memoryview) -> None:
        beside = path.with_name(f".{path.name}.tmp")
        with beside.open("wb") as file:
            for start in range(0, len(value), 1 << 18):
                file.write(value[start : start + (1 << 18)])
                time.sleep(0.002)
        beside.rename(path)


@mutant(
    "contract.read_during_write_by_another_client",
    "lifecycle.killed_writer_leaves_no_torn_page",
)
class WritesInPlace(DirectoryStorage):
    """The file has its name and its full size before its bytes (sglang#29969: NIXL)."""

    def publish(self, path: Path, value: memoryview) -> None:
        with path.open("wb") as file:
            file.truncate(len(value))
            for start in range(0, len(value), 1 << 16):
                file.write(value[start : start + (1 << 16)])
                file.flush()
                time.sleep(0.002)


@mutant("contract.two_clients_one_store")
class BlindToOthers(DirectoryStorage):
    """What was missing once is missing until this client stores it itself."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._missing: set[str] = set()

    def exists(self, key: str) -> bool:
        if key in self._missing or not super().exists(key):
            self._missing.add(key)
            return False
        return True

    def set(self, key: str, value: memoryview) -> None:
        self._missing.discard(key)
        super().set(key, value)


@mutant("contract.two_processes_one_store")
class DirectoryPerProcess(DirectoryStorage):
    """Each process has files of its own."""

    def path(self, key: str) -> Path:
        namespace, _, name = key.partition("/")
        return self.root / f"{namespace}-{os.getpid()}" / name


@mutant("identity.mla_is_shared_by_tensor_ranks", "contract.two_clients_one_store")
class DirectoryPerClient(DirectoryStorage):
    """Each client has files of its own: an MLA page is stored once per rank (sglang#8865)."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._mine = uuid.uuid4().hex

    def path(self, key: str) -> Path:
        namespace, _, name = key.partition("/")
        return self.root / f"{namespace}-{self._mine}" / name


@mutant("lifecycle.killed_writer_keeps_its_word", "stateful.programs_with_kills")
class WritesBehind(DirectoryStorage):
    """set returns before the page is on its way; what is still in the queue dies with the process."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._waiting: dict[str, bytes] = {}

    def get(self, key: str) -> bytes | None:
        return self._waiting.get(key) or super().get(key)

    def exists(self, key: str) -> bool:
        return key in self._waiting or super().exists(key)

    def set(self, key: str, value: memoryview) -> None:
        self._waiting[key] = bytes(value)
        if len(self._waiting) > 64:
            self.close()

    def close(self) -> None:
        while self._waiting:
            key, value = self._waiting.popitem()
            super().set(key, memoryview(value))


@mutant("lifecycle.killed_peer_does_not_stop_the_others")
class LockFileStays(DirectoryStorage):
    """A writer locks the directory with a file, which nobody removes when the writer dies."""

    def publish(self, path: Path, value: memoryview) -> None:
        lock = self.root / "lock"
        ends_at = time.monotonic() + 0.2
        while True:
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                if time.monotonic() > ends_at:
                    raise UnavailableError("the directory is locked") from None
                time.sleep(0.001)
        super().publish(path, value)
        time.sleep(0.03)
        lock.unlink()


class _InItsWriter(DirectoryStorage):
    """The directory holds keys; their content is in the process that stored it, and goes with it."""

    def set(self, key: str, value: memoryview) -> None:
        super().set(key, memoryview(os.getpid().to_bytes(4, "little") + bytes(value)))

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        if value is None:
            return None
        if not os.path.exists(f"/proc/{int.from_bytes(value[:4], 'little')}"):
            raise UnavailableError("its owner is gone")
        return value[4:]


@mutant("lifecycle.pages_of_a_killed_process_are_not_promised")
class TrustsExistence(_InItsWriter):
    """A key is promised for ever after its content died with its owner (sglang#31315)."""


@mutant("lifecycle.pages_of_a_killed_process_are_not_promised")
class NeverReplacesTheLost(_InItsWriter):
    """What died with its owner is noticed, and a set of it does nothing, as the key is there."""

    def exists(self, key: str) -> bool:
        try:
            return self.get(key) is not None
        except UnavailableError:
            return False

    def set(self, key: str, value: memoryview) -> None:
        if not super().exists(key):
            super().set(key, value)


_everyone = threading.Lock()


@mutant("lifecycle.fork_is_safe")
class LockSurvivesFork(DirectoryStorage):
    """A thread holds a lock of the module most of the time; a forked child inherits it locked."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        with _everyone:
            super().__init__(settings, namespace)
        self._closed = threading.Event()
        threading.Thread(target=self._keep_busy, daemon=True).start()

    def _keep_busy(self) -> None:
        while not self._closed.is_set():
            with _everyone:
                self._closed.wait(0.05)
            time.sleep(0)

    def close(self) -> None:
        self._closed.set()


@mutant("lifecycle.fork_is_safe")
class FailsInTheChild(DirectoryStorage):
    """A forked child is told that the store is down."""

    _opened_in: ClassVar[set[int]] = set()

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        self._opened_in.add(os.getpid())
        if len(self._opened_in) > 1:
            raise UnavailableError("no connection")
        super().__init__(settings, namespace)
