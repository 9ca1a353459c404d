"""The Mooncake backend: a page is one object, a batch is one call, nothing is believed unseen."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from hicache_storage import (
    Buffer,
    BufferMismatchError,
    Capabilities,
    ClosedError,
    CorruptError,
    HiCacheStorage,
    Namespace,
    Page,
    Status,
    UnavailableError,
    page_nbytes,
)
from hicache_storage.storage import check_batch
from hicache_storage_mooncake import batches, codes, library
from hicache_storage_mooncake.client import acquire, release, share_nbytes
from hicache_storage_mooncake.gate import Gate
from hicache_storage_mooncake.objects import Objects
from hicache_storage_mooncake.regions import Regions
from hicache_storage_mooncake.settings import MooncakeSettings

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 4.0
CLEAR_PASSES = 3


class MooncakeStorage(HiCacheStorage):
    """Pages in Mooncake Store, seen by every client of the same master. Thread-safe.

    It is not ``bounded``, and cannot be: a transfer that Mooncake has begun cannot be called off.
    Mooncake gives up waiting after 60 s while an RDMA write, or a TCP read that trickles, may still
    land in the page (``TransferFuture`` in 0.3.13.post1). So the SDK's DeadlineLayer runs the calls on
    memory of its own; that copy is the price of calls that end in time. Used bare, without layers, it
    moves pages straight between the caller's memory and Mooncake's, and returns when Mooncake does: an
    unanswered master costs ``rpc_seconds``, a TCP peer that has stopped a few seconds.

    In a forked child every call raises ClosedError, and opening one UnsupportedError: Mooncake cannot
    be used there (``forked``).
    """

    Settings = MooncakeSettings
    capabilities = Capabilities(zero_copy=True, shared=True, delete=True, clear=True, evicts=True)

    def __init__(self, settings: MooncakeSettings, namespace: Namespace) -> None:
        """Raises MooncakeMissingError without the wheel, UnavailableError when no master answers."""
        super().__init__(settings, namespace)
        self._share = share_nbytes(settings, namespace.ranks)
        config = library.replicate_config(
            library.load(),
            replicas=settings.replicas,
            soft_pin=settings.soft_pin,
            hard_pin=settings.hard_pin,
        )
        self._client = acquire(settings, namespace.ranks)
        try:
            self._client.segments.mount(self._share)
        except UnavailableError:
            release(self._client)
            raise
        self._gate = Gate()
        self._regions = Regions()
        self._objects = Objects(
            self._client,
            config,
            self._gate.closing,
            patience=settings.full_seconds,
            lost=settings.lost_seconds,
        )
        self.capabilities = replace(self.capabilities, persistent=self._share == 0)

    def get(self, key: str) -> memoryview | None:
        with self._gate.entered():
            nbytes = self._objects.size(key)
            if nbytes in codes.ABSENT:
                return None
            if nbytes <= 0:
                raise codes.error_of(nbytes, f"get of {key}")
            memory = mmap.mmap(-1, nbytes)
            with self._objects.registered(memory) as buffer:
                code = self._objects.read([key], [[buffer.address]], [[nbytes]])[0]
        status = _status_of_read(code, nbytes)
        if status is Status.MISSING:
            return None
        if status is Status.CORRUPT:
            raise CorruptError(f"{key} changed its size while it was read")
        if not status:
            raise codes.error_of(code, f"get of {key}")
        return memoryview(memory)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        source = memoryview(value).cast("B")
        if source.nbytes == 0:
            raise BufferMismatchError("Mooncake stores no objects of 0 bytes")
        memory = mmap.mmap(-1, source.nbytes)
        memory[:] = source
        with self._gate.entered(), self._objects.registered(memory) as buffer:
            code = self._objects.write([key], [[buffer.address]], [[source.nbytes]])[0]
        if code != codes.OK:
            raise codes.error_of(code, f"set of {key}")

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        with self._gate.entered():
            found = self._objects.present(keys)
        if found and all(code < 0 for code in found):
            raise codes.error_of(found[0], "exists")
        return [code == codes.EXISTS for code in found]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with self._gate.entered():
            self._regions.check(pages)
            first, twins = batches.apart(keys)
            got = self._objects.read(list(first), *batches.scatter_lists([pages[i] for i in first.values()]))
            statuses = [Status.MISSING] * len(keys)
            for i, code in zip(first.values(), got, strict=True):
                statuses[i] = _status_of_read(code, page_nbytes(pages[i]))
            for twin in twins:
                source = first[keys[twin]]
                statuses[twin] = batches.copied(pages[source], pages[twin], statuses[source])
            return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with self._gate.entered():
            self._regions.check(pages)
            first, _ = batches.apart(keys)
            done = self._objects.write(
                list(first), *batches.scatter_lists([pages[i] for i in first.values()])
            )
        stored = dict(zip(first, done, strict=True))
        return [
            Status.OK if stored[key] == codes.OK else Status.of(codes.error_of(stored[key], "set"))
            for key in keys
        ]

    def register_buffer(self, buffer: Buffer) -> None:
        with self._gate.entered():
            if buffer.nbytes == 0:
                return
            self._client.register(buffer)
            self._regions.add(buffer)

    def unregister_buffer(self, buffer: Buffer) -> None:
        with suppress(ClosedError), self._gate.entered():
            if self._regions.remove(buffer):
                self._client.unregister(buffer)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove these keys, leased ones too: a reader that is at it finds out by the checksum."""
        with self._gate.entered():
            removed = self._objects.remove(keys)
        for code in removed:
            if code != codes.OK and code not in codes.ABSENT:
                raise codes.error_of(code, "delete")

    def clear(self) -> None:
        """Remove every page of this namespace and tenant, leased ones too, and nothing else.

        Raises UnavailableError saying how many were found anew when others keep storing meanwhile.
        """
        removed = 0
        with self._gate.entered():
            for _ in range(CLEAR_PASSES):
                removed = self._objects.remove_matching(f"^{self.namespace.digest}/")
                if removed < 0:
                    raise codes.error_of(removed, "clear")
                if removed == 0:
                    return
        raise UnavailableError(f"pages are being stored while they are cleared: {removed} in the last pass")

    def describe(self) -> dict[str, str]:
        with self._gate.entered():
            identity = self._client.identity
            counted = self._client.master.counters()
        facts = {
            "master": identity.master,
            "protocol": identity.protocol,
            "segment": f"{self._share} bytes in this process",
            "unreadable keys": str(self._objects.lost),
            "mooncake": ", ".join(f"{name} {version}" for name, version in library.wheels().items()),
        }
        return facts | {f"master's {fact}": str(value) for fact, value in counted.items()}

    def close(self) -> None:
        """End calls in progress, unregister all memory, take the segment back, let go of the client.

        Calls that are stuck in Mooncake for ``CLOSE_SECONDS`` keep memory and client: to take either
        away from under them would end the process.
        """
        if not self._gate.shut():
            return
        if not self._gate.emptied(CLOSE_SECONDS):
            logger.warning("calls are stuck in Mooncake; its client and the registered memory stay behind")
            return
        for buffer in self._regions.drain():
            self._client.unregister(buffer)
        self._client.segments.unmount(self._share)
        release(self._client)


def _status_of_read(code: int, nbytes: int) -> Status:
    """What a code of ``Objects.read`` says about a page of this size."""
    if code == nbytes and nbytes:
        return Status.OK
    if code in codes.ABSENT:
        return Status.MISSING
    if code >= 0 or code == codes.CHECKSUM:
        return Status.CORRUPT
    return Status.of(codes.error_of(code, "get"))
