"""The second reference store: batch calls of its own, straight to and from registered memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hicache_conformance.reference import ReferenceStorage
from hicache_storage import (
    Buffer,
    BufferMismatchError,
    Capabilities,
    Namespace,
    Page,
    Status,
    page_nbytes,
    time_left,
)
from hicache_storage.buffers import scatter, views
from hicache_storage.storage import check_batch

MAX_OBJECT_NBYTES = 64 << 20


class NativeStorage(ReferenceStorage):
    """Pages in a dict, moved without a copy in between, by the deadline, in registered memory only."""

    capabilities = Capabilities(
        zero_copy=True, bounded=True, delete=True, clear=True, max_object_nbytes=MAX_OBJECT_NBYTES
    )

    def __init__(self, settings: Any, namespace: Namespace, store: dict[str, bytes] | None = None) -> None:
        super().__init__(settings, namespace, store)
        self.regions: list[Buffer] = []

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return [key in self.store for key in keys]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        self.check_registered(pages)
        return [
            Status.TIMED_OUT if time_left() == 0 else self.read_page(key, page)
            for key, page in zip(keys, pages, strict=True)
        ]

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        self.check_registered(pages)
        return [
            Status.TIMED_OUT if time_left() == 0 else self.write_page(key, page)
            for key, page in zip(keys, pages, strict=True)
        ]

    def read_page(self, key: str, page: Page) -> Status:
        """Move one object into its page."""
        value = self.store.get(key)
        if value is None:
            return Status.MISSING
        if len(value) != page_nbytes(page):
            return Status.CORRUPT
        scatter(value, page)
        return Status.OK

    def write_page(self, key: str, page: Page) -> Status:
        """Make one object of its page."""
        if page_nbytes(page) > MAX_OBJECT_NBYTES:
            return Status.FAILED
        self.store[key] = b"".join(views(page))
        return Status.OK

    def register_buffer(self, buffer: Buffer) -> None:
        self.regions.append(buffer)

    def unregister_buffer(self, buffer: Buffer) -> None:
        self.regions.remove(buffer)

    def check_registered(self, pages: Sequence[Page]) -> None:
        """Raise BufferMismatchError unless every buffer lies in one registered region."""
        for page in pages:
            for buffer in page:
                if not any(region.contains(buffer) for region in self.regions):
                    raise BufferMismatchError(
                        f"{buffer.nbytes} bytes at {buffer.address:#x} lie in no registered buffer"
                    )
