"""The Mooncake backend: a page is one object, a batch is one call, nothing is believed unseen."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial

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
    time_left,
)
from hicache_storage.buffers import gather, scatter
from hicache_storage.layers.breaker import KeyMemory
from hicache_storage.storage import check_batch
from hicache_storage_mooncake import batches, codes, library
from hicache_storage_mooncake.client import acquire, release
from hicache_storage_mooncake.gate import Gate
from hicache_storage_mooncake.regions import Regions
from hicache_storage_mooncake.settings import DEFAULT_TENANT, MooncakeSettings

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 4.0
CLEAR_PASSES = 3
LOST_KEYS = 65_536
STALE_SECONDS = 60.0
"""A put on a key that is there does nothing, although its bytes may be gone with their owner. For this
long after it could not be read, such a key is removed before it is stored.
"""
UNFINISHED_SECONDS = 0.3
"""How long a page that another client is writing is waited for before it counts as abandoned."""
FULL_SECONDS = 5.0
"""After the store stayed full for all of ``full_seconds``, writes are not tried twice for this long."""


class MooncakeStorage(HiCacheStorage):
    """Pages in Mooncake Store, seen by every client of the same master. Thread-safe.

    It is not ``bounded``, and cannot be: a transfer that Mooncake has begun cannot be called off.
    Mooncake gives up waiting after 60 s while an RDMA write, or a TCP read that trickles, may still
    land in the page (``TransferFuture`` in 0.3.13.post1). So the SDK's DeadlineLayer runs the calls on
    memory of its own; that copy is the price of calls that end in time. Used bare, without layers, it
    moves pages straight between the caller's memory and Mooncake's, and returns when Mooncake does: an
    unanswered master costs ``rpc_seconds``, a TCP peer that has stopped a few seconds.

    In a forked child every call raises ClosedError; the child opens a storage of its own.
    """

    Settings = MooncakeSettings
    capabilities = Capabilities(zero_copy=True, shared=True, delete=True, clear=True, evicts=True)

    def __init__(self, settings: MooncakeSettings, namespace: Namespace) -> None:
        """Raises MooncakeMissingError without the wheel, UnavailableError when no master answers."""
        super().__init__(settings, namespace)
        self._config = library.replicate_config(
            library.load(),
            replicas=settings.replicas,
            soft_pin=settings.soft_pin,
            hard_pin=settings.hard_pin,
        )
        self._client = acquire(settings, namespace.ranks)
        self._gate = Gate()
        self._regions = Regions()
        self._lost = KeyMemory(settings.lost_seconds, LOST_KEYS)
        self._stale = KeyMemory(STALE_SECONDS, LOST_KEYS)
        self._full_until = 0.0
        pure = self._client.identity.segment_nbytes == 0
        self.capabilities = replace(self.capabilities, persistent=pure)
        if settings.tenant_id != DEFAULT_TENANT:
            logger.warning(
                "tenant_id=%s keeps nothing apart unless the master runs with --enable_multi_tenants=true; "
                "the setting tenant does, on any master",
                settings.tenant_id,
            )

    def get(self, key: str) -> memoryview | None:
        with self._gate.entered():
            nbytes = self._one(lambda: self._client.store.get_size(key))
            if nbytes in codes.ABSENT or key in self._lost:
                return None
            if nbytes <= 0:
                raise codes.error_of(nbytes, f"get of {key}")
            memory = mmap.mmap(-1, nbytes)
            with self._registered(memory) as buffer:
                code = self._get([key], [[buffer.address]], [[nbytes]])[0]
                status = self._status_of_get(key, code, nbytes)
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
        with self._gate.entered(), self._registered(memory) as buffer:
            code = self._set([key], [[buffer.address]], [[source.nbytes]])[0]
        if code != codes.OK:
            raise codes.error_of(code, f"set of {key}")

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        with self._gate.entered():
            found = self._ask(lambda: self._client.store.batch_is_exist(list(keys)), len(keys))
        if found and all(code < 0 for code in found):
            raise codes.error_of(found[0], "exists")
        return [code == codes.EXISTS and key not in self._lost for key, code in zip(keys, found, strict=True)]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with self._gate.entered():
            self._regions.check(pages)
            first, twins = batches.apart(keys)
            there = [i for i in first.values() if keys[i] not in self._lost]
            statuses = [Status.MISSING] * len(keys)
            got = self._get([keys[i] for i in there], *batches.scatter_lists([pages[i] for i in there]))
            for i, code in zip(there, got, strict=True):
                statuses[i] = self._status_of_get(keys[i], code, page_nbytes(pages[i]))
            for twin in twins:
                statuses[twin] = batches.copied(
                    pages[first[keys[twin]]], pages[twin], statuses[first[keys[twin]]]
                )
            return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        with self._gate.entered():
            self._regions.check(pages)
            first, _ = batches.apart(keys)
            done = self._set(list(first), *batches.scatter_lists([pages[i] for i in first.values()]))
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
            removed = self._ask(lambda: self._client.store.batch_remove(list(keys), True), len(keys))
            self._forget(keys)
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
                # without force Mooncake skips what was looked up lately, and says nothing
                removed = self._one(
                    lambda: self._client.store.remove_by_regex(f"^{self.namespace.digest}/", True)
                )
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
            "segment": f"{identity.segment_nbytes} bytes in this process",
            "unreadable keys": str(len(self._lost)),
            "mooncake": ", ".join(f"{name} {version}" for name, version in library.wheels().items()),
        }
        return facts | {f"master's {fact}": str(value) for fact, value in counted.items()}

    def close(self) -> None:
        """End calls in progress, unregister all memory, let go of the client.

        Calls that are stuck in Mooncake for ``CLOSE_SECONDS`` keep memory and client: to take either
        away from under them would end the process.
        """
        first = not self._gate.closing.is_set()
        if self._gate.shut(CLOSE_SECONDS):
            for buffer in self._regions.drain():
                self._client.unregister(buffer)
            release(self._client)
        elif first:
            logger.warning("calls are stuck in Mooncake; its client and the registered memory stay behind")

    def _get(self, keys: Sequence[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        got: list[int] = []
        get = self._client.store.batch_get_into_multi_buffers
        for part in batches.parts(sizes):
            call = partial(get, list(keys[part]), addresses[part], sizes[part])
            got += self._ask(call, len(sizes[part]))
        return got

    def _set(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """The codes of storing these objects; a store that is full, or lost an owner, is asked again."""
        stale = [key for key in keys if key in self._stale] if len(self._stale) else []
        if stale:
            self._ask(partial(self._client.store.batch_remove, stale, True), len(stale))
        ends_at = self._patience()
        pause = 0.02
        done = self._look(keys)
        unfinished = [i for i, code in enumerate(done) if code == codes.NOT_READY]
        todo = [i for i, code in enumerate(done) if code in codes.ABSENT and code != codes.NOT_READY]
        while todo:
            put = self._put([keys[i] for i in todo], [addresses[i] for i in todo], [sizes[i] for i in todo])
            for i, code in zip(todo, put, strict=True):
                done[i] = code
            todo = [i for i in todo if done[i] in codes.WORTH_RETRYING]
            if todo and (time.monotonic() + pause > ends_at or self._gate.closing.wait(pause)):
                break
            pause = min(2 * pause, 0.2)
        if codes.NO_ROOM in done:
            self._full_until = time.monotonic() + FULL_SECONDS
        for i in unfinished:
            done[i] = self._finish(keys[i], addresses[i], sizes[i])
        self._forget([key for key, code in zip(keys, done, strict=True) if code == codes.OK])
        return done

    def _look(self, keys: list[str]) -> list[int]:
        """OK, NOT_FOUND or NOT_READY of each key, or why the master could not be asked.

        A put would say OK to all three. What is absent gets no lease by this.
        """
        start = getattr(self._client.store, "batch_get_session_start", None)
        if start is None:
            return [codes.NOT_FOUND] * len(keys)
        found = self._ask(partial(start, keys), len(keys))
        there = [key for key, code in zip(keys, found, strict=True) if code >= codes.OK]
        if there:
            self._client.store.batch_get_session_end(there)
        return found

    def _finish(self, key: str, addresses: list[int], sizes: list[int]) -> int:
        """Wait for the writer who is at this key; replace what a writer left who is gone.

        Until the master gives such an object up, after 30 s, a put on it does nothing and says OK; an
        upsert, which takes one piece of memory, replaces it (0.3.13.post1).
        """
        ends_at = time.monotonic() + UNFINISHED_SECONDS
        while (code := self._look([key])[0]) == codes.NOT_READY and time.monotonic() < ends_at:
            if self._gate.closing.wait(0.01):
                break
        if code >= codes.OK or code not in codes.ABSENT:
            return min(code, codes.OK)
        whole = mmap.mmap(-1, sum(sizes))
        scatter(gather([Buffer(*piece) for piece in zip(addresses, sizes, strict=True)]), [Buffer.of(whole)])
        with self._registered(whole) as buffer:
            upsert = partial(self._client.store.batch_upsert_from, [key], [buffer.address], [buffer.nbytes])
            return self._ask(partial(upsert, self._config), 1)[0]

    def _forget(self, keys: Sequence[str]) -> None:
        """These keys are as they should be again."""
        self._lost.discard(keys)
        self._stale.discard(keys)

    def _put(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        done: list[int] = []
        put = self._client.store.batch_put_from_multi_buffers
        for part in batches.parts(sizes):
            call = partial(put, keys[part], addresses[part], sizes[part], self._config)
            done += self._ask(call, len(sizes[part]))
        return done

    def _patience(self) -> float:
        """Until when a full store is asked again; half of the deadline is left for the others."""
        now = time.monotonic()
        if now < self._full_until:
            return now
        left = time_left()
        patience: float = self.settings.full_seconds
        return now + (patience if left is None else min(patience, left / 2))

    def _status_of_get(self, key: str, code: int, nbytes: int) -> Status:
        if code == nbytes and nbytes:
            return Status.OK
        if code in codes.ABSENT:
            return Status.MISSING
        if code >= 0 or code == codes.CHECKSUM:
            return Status.CORRUPT
        if code in (codes.INVALID, codes.TRANSFER_FAILED):
            stored = self._client.store.get_size(key)
            if stored >= 0 and stored != nbytes:
                return Status.CORRUPT
            if code == codes.TRANSFER_FAILED:
                self._lost.add([key])
                self._stale.add([key])
                return Status.MISSING
        return Status.of(codes.error_of(code, "get"))

    def _ask(self, call: Callable[[], Sequence[int]], count: int) -> list[int]:
        """The codes that ``call`` answers with; it is not made while the master is known to be dead.

        With a dead master each call would take 4.3 s, whatever the limits (0.3.13.post1).
        """
        if count == 0:
            return []
        if self._client.master.known_dead():
            return [codes.RPC_FAILED] * count
        answer = codes.complete(call(), count)
        self._client.master.heard(silent=not codes.MASTER_SILENT.isdisjoint(answer))
        return answer

    def _one(self, call: Callable[[], int]) -> int:
        return self._ask(lambda: [call()], 1)[0]

    @contextmanager
    def _registered(self, memory: mmap.mmap) -> Iterator[Buffer]:
        """Memory of our own for one object, known to Mooncake while inside."""
        buffer = Buffer.of(memory)
        self._client.register(buffer)
        try:
            yield buffer
        finally:
            self._client.unregister(buffer)
