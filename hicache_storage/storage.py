"""The contract between HiCache and a storage backend.

An author writes three methods: ``get``, ``exists`` and ``set``. Everything else has a default
that calls those three. A fast author overrides the batch methods, which move pages straight
between the store and the caller's memory.

What the caller guarantees
    Keys were made by ``Namespace.key``; they are content hashes, so the same key always means
    the same bytes. ``keys`` and ``pages`` have one length. Page memory stays valid until the call
    returns.

What the backend owes
    Calls come from several threads at once: SGLang runs one query, one prefetch and one backup
    thread per rank. A batch answers for every key, in order, and one bad page never costs the
    others. Once a call has returned, nothing touches the caller's memory any more, not even after
    a failure. Bytes that cannot be proved are a miss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from hicache_storage.buffers import Buffer, Page, gather, page_nbytes, scatter
from hicache_storage.errors import (
    BufferMismatchError,
    CorruptError,
    DeadlineError,
    RequestError,
    StorageError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from hicache_storage.namespace import Namespace

ReadableBuffer: TypeAlias = bytes | bytearray | memoryview
"""What ``get`` may return: anything that can be read in place."""

BATCH_PAGES = 128
"""Pages in one call of SGLang's cache controller (``STORAGE_BATCH_SIZE``)."""


class Status(Enum):
    """What became of one page of a batch. Only OK is truthy."""

    OK = "ok"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"
    TIMED_OUT = "timed out"

    def __bool__(self) -> bool:
        return self is Status.OK

    @classmethod
    def of(cls, error: StorageError) -> Status:
        """The status that tells the caller of a batch about this error."""
        if isinstance(error, CorruptError):
            return cls.CORRUPT
        if isinstance(error, DeadlineError):
            return cls.TIMED_OUT
        return cls.FAILED


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do: asked of it, never configured by the user.

    A class states what it always has; an instance may narrow that after probing its store.
    """

    zero_copy: bool = False
    """Batch calls move bytes between store and page memory without a copy in between."""
    bounded: bool = False
    """Batch calls end by ``deadline.time_left()`` on their own and never touch pages later."""
    page_hook: bool = False
    """Batch calls run ``page_hook.page_work()`` on each page while it is in the processor's cache."""
    persistent: bool = False
    """Pages survive ``close`` and the end of the process."""
    shared: bool = False
    """A second client, in another process, sees what this one stored."""
    delete: bool = False
    """``delete`` works. Without it, ``set`` must overwrite a key that is present."""
    clear: bool = False
    """``clear`` works."""
    evicts: bool = False
    """The backend bounds its own size: a stored page may be gone later."""
    alignment: int = 1
    """Buffers of this size, in bytes, let the backend use its fastest path (O_DIRECT, GDS)."""
    max_object_nbytes: int | None = None
    """Largest object, in bytes; None when there is no limit worth naming."""


class HiCacheStorage(ABC):
    """A keyspace of pages in L3. Subclass it, write three methods, and it works everywhere.

    ``settings`` is an instance of the class attribute ``Settings`` (any pydantic model; the
    default takes no keys). ``namespace`` names whose pages these are: keys already carry its
    digest, so a backend needs it only for ``clear`` and for display.
    """

    Settings: ClassVar[type[Any] | None] = None
    capabilities: Capabilities = Capabilities()

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        self.settings = settings
        self.namespace = namespace

    @abstractmethod
    def get(self, key: str) -> ReadableBuffer | None:
        """The object's bytes, or None when the key is not there. May raise StorageError."""

    @abstractmethod
    def exists(self, key: str) -> bool:
        """Whether a ``get`` of this key would very likely succeed. May raise StorageError."""

    @abstractmethod
    def set(self, key: str, value: memoryview) -> None:
        """Store the object so that readers see all of it or none of it.

        ``value`` is the caller's memory: copy what outlives the call. May raise StorageError;
        having returned means stored.
        """

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """``exists`` for each key, in order. May raise StorageError for the batch as a whole."""
        return [self.exists(key) for key in keys]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        """Read each object into its page. A page's memory is undefined unless its status is OK.

        Raises RequestError when the arguments do not fit each other; everything else is a status.
        """
        check_batch(keys, pages)
        return [self._get_into(key, page) for key, page in zip(keys, pages, strict=True)]

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        """Store each page under its key. OK means that a later ``get`` finds it.

        Raises RequestError when the arguments do not fit each other; everything else is a status.
        """
        check_batch(keys, pages)
        return [self._set_from(key, page) for key, page in zip(keys, pages, strict=True)]

    def register_buffer(self, buffer: Buffer) -> None:
        """Announce memory that pages will point into (the whole of L2, once, before any page).

        A backend that needs no registration ignores it. Raises StorageError when the memory
        cannot be registered; the caller then must not use it for pages.
        """

    def unregister_buffer(self, buffer: Buffer) -> None:
        """Take back ``register_buffer``; no call in progress may use the memory."""

    def delete(self, keys: Sequence[str]) -> None:
        """Remove these keys; a missing key is fine. Raises UnsupportedError by default."""
        raise UnsupportedError(f"{type(self).__name__} cannot delete ({len(keys)} keys)")

    def clear(self) -> None:
        """Remove every page of this namespace and nothing else. UnsupportedError by default."""
        raise UnsupportedError(f"{type(self).__name__} cannot clear; bump the epoch instead")

    def describe(self) -> dict[str, str]:
        """Facts for an operator, such as where the pages are and how much room there is."""
        return {}

    def close(self) -> None:
        """Release threads, descriptors and registrations. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _get_into(self, key: str, page: Page) -> Status:
        try:
            value = self.get(key)
        except RequestError:
            raise
        except StorageError as error:
            return Status.of(error)
        if value is None:
            return Status.MISSING
        if memoryview(value).nbytes != page_nbytes(page):
            return Status.CORRUPT
        scatter(value, page)
        return Status.OK

    def _set_from(self, key: str, page: Page) -> Status:
        try:
            self.set(key, gather(page))
        except RequestError:
            raise
        except StorageError as error:
            return Status.of(error)
        return Status.OK


def check_batch(keys: Sequence[str], pages: Sequence[Page]) -> None:
    """Raise BufferMismatchError unless there is one page for each key."""
    if len(keys) != len(pages):
        raise BufferMismatchError(f"{len(keys)} keys but {len(pages)} pages; a batch has one page a key")


def batches(count: int, size: int = BATCH_PAGES) -> Iterator[slice]:
    """Slices that cut ``count`` pages into batches of at most ``size``."""
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
