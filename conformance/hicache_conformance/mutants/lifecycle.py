"""Open, close and clear gone wrong: leaks, hangs, too little and too much removed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

from hicache_conformance.directory import DirectoryStorage
from hicache_conformance.mutants import mutant
from hicache_conformance.native import NativeStorage
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Capabilities, Namespace, Page, Status


@mutant("lifecycle.reopen_finds_what_was_stored")
class ForgetsOnClose(DirectoryStorage):
    """Says that it is persistent, and cleans up after itself."""

    def close(self) -> None:
        self.clear()


@mutant("lifecycle.close_twice")
class CloseTwiceRaises(ReferenceStorage):
    """The second close finds the client gone."""

    def close(self) -> None:
        del self.store


@mutant("lifecycle.hundred_attaches_leave_nothing")
class ThreadLeak(ReferenceStorage):
    """Each instance starts a thread that nobody ends."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        threading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()


@mutant("lifecycle.hundred_attaches_leave_nothing")
class DescriptorLeak(ReferenceStorage):
    """Each instance opens a file that nobody closes (sglang#21078)."""

    leaked: ClassVar[list[int]] = []

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self.leaked.append(os.open(os.devnull, os.O_RDONLY))


@mutant("lifecycle.hundred_attaches_leave_nothing")
class MemoryLeak(ReferenceStorage):
    """A table of the module remembers what every instance has stored."""

    leaked: ClassVar[list[dict[str, bytes]]] = []

    def close(self) -> None:
        self.leaked.append(self.store)


@mutant("lifecycle.clear_removes_all_of_this_namespace")
class ClearSparesLeases(ReferenceStorage):
    """clear leaves what was read a moment ago (sglang#40409)."""

    def get(self, key: str) -> bytes | None:
        self._leased = key
        return super().get(key)

    def clear(self) -> None:
        leased = getattr(self, "_leased", "")
        kept = self.store.get(leased)
        super().clear()
        if kept is not None:
            self.store[leased] = kept


@mutant("lifecycle.clear_is_seen_by_a_second_client")
class ClearOnlyHides(DirectoryStorage):
    """clear forgets the keys in this client, and leaves the files to a cleaner that comes by later."""

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._hidden = False

    def exists(self, key: str) -> bool:
        return not self._hidden and super().exists(key)

    def get(self, key: str) -> bytes | None:
        return None if self._hidden else super().get(key)

    def set(self, key: str, value: memoryview) -> None:
        self._hidden = False
        super().set(key, value)

    def clear(self) -> None:
        self._hidden = True


@mutant("lifecycle.clear_leaves_other_namespaces_alone")
class ClearTooWide(ReferenceStorage):
    """clear removes every page of the store (sglang#32693)."""

    def clear(self) -> None:
        self.store.clear()


@mutant("lifecycle.what_is_not_there_says_so")
class PretendsToDelete(ReferenceStorage):
    """delete returns without deleting, and does not declare that it cannot."""

    capabilities = Capabilities()

    def delete(self, keys: Sequence[str]) -> None:
        pass


class _ClosedFlag(ReferenceStorage):
    """Knows whether it was closed."""

    closed = False

    def close(self) -> None:
        self.closed = True


@mutant("lifecycle.use_after_close")
class BreaksAfterClose(_ClosedFlag):
    """A call after close raises whatever the library below raises."""

    def exists(self, key: str) -> bool:
        if self.closed:
            raise ValueError("I/O operation on closed file")
        return super().exists(key)


@mutant("lifecycle.close_during_a_batch")
class PullsTheRug(NativeStorage):
    """close frees the tables that a batch is just going through."""

    def read_page(self, key: str, page: Page) -> Status:
        time.sleep(0.001)
        return super().read_page(key, page)

    def close(self) -> None:
        self.__dict__.pop("store", None)
