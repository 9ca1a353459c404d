"""The NIXL backend: one agent, one of its plugins, pages as files or as objects."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from hicache_storage import (
    Buffer,
    Capabilities,
    ClosedError,
    HiCacheStorage,
    Namespace,
    Page,
    Status,
    UnsupportedError,
)
from hicache_storage.storage import check_batch
from hicache_storage_nixl.agent import Agent, create
from hicache_storage_nixl.files import Files
from hicache_storage_nixl.objects import Objects
from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.transfers import Transfers


class NixlStorage(HiCacheStorage):
    """Pages behind the NIXL plugin that ``settings`` name, or the first that initialises.

    NIXL cannot call a transfer off, nor give one up without its data arriving later. So a call that
    has a deadline never lets NIXL see the caller's memory: pages pass through registered slots of ours,
    copied under a lease that ends with the deadline. A transfer that is in flight then keeps its slots
    and its thread until it is done, whenever that is, and is released only then. A call without a
    deadline waits as long as the store takes, so files are read straight into registered L2 and
    written from there.

    Thread-safe: the agent is created with NIXL's reader-writer locks. Of no use in a child that was
    forked after it was opened: calls there raise ClosedError, and the child opens its own.
    """

    Settings = NixlSettings
    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, settings: NixlSettings, namespace: Namespace) -> None:
        """Raises SettingsError when the plugin cannot be used, StorageError when its store cannot."""
        super().__init__(settings, namespace)
        self._pid = os.getpid()
        with ExitStack() as undo:
            agent = create(settings)
            transfers = Transfers(agent)
            undo.callback(transfers.close)
            pages: Files | Objects = (
                Files(settings, namespace, transfers)
                if agent.kind == "FILE"
                else Objects(settings, agent, transfers)
            )
            undo.pop_all()
        self.capabilities = pages.capabilities
        self._opened: tuple[Agent, Transfers, Files | Objects] | None = (agent, transfers, pages)

    def get(self, key: str) -> bytearray | None:
        return self._pages().get(key)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        self._pages().set(key, value)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._pages().batch_exists(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        return self._pages().batch_get_into(keys, pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        return self._pages().batch_set_from(keys, pages)

    def register_buffer(self, buffer: Buffer) -> None:
        """Announce memory for pages, once. Raises UnavailableError.

        Files are moved there directly when a call has no deadline; BufferMismatchError is what pages
        outside it get then.
        """
        self._open()[1].register(buffer)

    def unregister_buffer(self, buffer: Buffer) -> None:
        if self._opened is not None:
            self._opened[1].unregister(buffer)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove these pages. Raises UnsupportedError for object plugins: NIXL cannot remove objects."""
        pages = self._pages()
        if isinstance(pages, Objects):
            raise UnsupportedError("NIXL cannot remove objects: set overwrites them")
        pages.delete(keys)

    def clear(self) -> None:
        """Remove every page of this namespace. Raises UnsupportedError for object plugins."""
        pages = self._pages()
        if isinstance(pages, Objects):
            raise UnsupportedError("NIXL cannot remove objects: bump the epoch, or empty the bucket")
        pages.clear()

    def describe(self) -> dict[str, str]:
        agent, _, pages = self._open()
        return {"plugin": agent.nixl_name, "chosen": agent.why, **pages.describe()}

    def close(self) -> None:
        """Let go of the directory and the agent; calls in progress must have ended."""
        opened, self._opened = self._opened, None
        if opened is not None and self._pid == os.getpid():
            _, transfers, pages = opened
            pages.close()
            transfers.close()

    def _pages(self) -> Files | Objects:
        return self._open()[2]

    def _open(self) -> tuple[Agent, Transfers, Files | Objects]:
        if self._opened is None:
            raise ClosedError("the storage is closed")
        if self._pid != os.getpid():
            raise ClosedError("the storage was opened before this process was forked; open one here")
        return self._opened
