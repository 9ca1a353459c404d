"""Pages as objects of a store that NIXL talks to: S3 and Azure.

An object is moved in one piece, out of memory of our own: NIXL puts every descriptor of a list as
an object by itself. NIXL reports an object that is too short as read, with what was in memory before
as its tail, and tells nobody how large an object is (1.5.1). So every object is framed: the same
mark, made of its key and size, stands before and behind its content. Both are wiped from memory
before a read, and only the whole object of this key brings them back. A few bytes more than that are
asked for, and must not come. This holds with the integrity layer and without; damage between the
marks is what its checksum finds.
"""

from __future__ import annotations

import contextlib
import logging
import os
import struct
from collections.abc import Iterator, Sequence

import xxhash

from hicache_storage import (
    Buffer,
    Capabilities,
    CorruptError,
    DeadlineError,
    Page,
    SettingsError,
    Status,
    StorageError,
    UnavailableError,
    page_nbytes,
)
from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.buffers import copy
from hicache_storage.deadline import time_left
from hicache_storage.directory.bounded import in_time
from hicache_storage.directory.settings import RoomSettings
from hicache_storage_nixl.agent import Agent
from hicache_storage_nixl.exits import inside
from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.slots import SlotMemory
from hicache_storage_nixl.streams import Slots, Streams, live
from hicache_storage_nixl.transfers import Move, Transfers

logger = logging.getLogger(__name__)

MAX_OBJECTS = 64
"""Objects in flight in one stream; the store's own threads take them one by one."""

ASKED_AT_ONCE = 16
"""Keys of one question; NIXL asks for each that it gets, even when the store is dead."""

FILES_ONLY = {"root", "direct_io", *RoomSettings.model_fields}

_MARK = struct.Struct("<8sQ16s")
MARK_NBYTES = _MARK.size
FRAME_NBYTES = 2 * MARK_NBYTES

_BEYOND = os.urandom(16)
"""Stands in memory behind an object that is read; an object that is longer overwrites it."""


def mark(key: str, nbytes: int) -> bytes:
    """What stands before and behind ``nbytes`` bytes of content under ``key``."""
    return _MARK.pack(b"HICNIXL\x01", nbytes, xxhash.xxh3_128_digest(key.encode()))


class Objects:
    """Thread-safe. Calls end by their deadline."""

    # no delete: NIXL has none, and by contract such a backend overwrites
    capabilities = Capabilities(bounded=True, persistent=True, shared=True)

    def __init__(self, settings: NixlSettings, agent: Agent, transfers: Transfers) -> None:
        """Raises SettingsError for settings that only a directory of files can honour."""
        if unfit := sorted(settings.model_fields_set & FILES_ONLY):
            raise SettingsError(
                f"{unfit[0]}: for plugins that move files; a bucket is bounded by its own lifecycle rules"
            )
        self._prefix = settings.prefix
        self._agent = agent
        self._transfers = transfers
        self._memory = SlotMemory(transfers, settings.in_flight // settings.threads)
        self._lookups = BatchPool(4, "hicache-nixl-lookup")
        self._readers = Streams("hicache-nixl-read", settings.threads, self._memory)
        self._writers = Streams("hicache-nixl-write", settings.threads, self._memory)
        self._beyond = True

    def get(self, key: str) -> bytearray | None:
        head = in_time(self._lookups, lambda: self._head(key))
        if head is None:
            return None
        _, nbytes, _ = _MARK.unpack(head)
        status = Status.CORRUPT
        if head == mark(key, nbytes):
            value = bytearray(nbytes)
            status = self.batch_get_into([key], [(Buffer.of(value),)])[0]
        if status is Status.CORRUPT:
            raise CorruptError(f"the object under {key} is not whole, or no page")
        if status is Status.TIMED_OUT:
            raise DeadlineError(f"{key} was not read in time")
        if status is Status.FAILED:
            raise UnavailableError(f"{key} cannot be read")
        return value if status else None

    def set(self, key: str, value: memoryview) -> None:
        status = self.batch_set_from([key], [(Buffer.of(bytearray(value)),)])[0]
        if status is Status.TIMED_OUT:
            raise DeadlineError(f"{key} was not written in time")
        if not status:
            raise UnavailableError(f"the store does not take {key}")

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Raises UnavailableError when the store does not say, DeadlineError."""
        return in_time(self._lookups, lambda: self._present(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        sizes = [page_nbytes(page) for page in pages]
        statuses = [Status.TIMED_OUT] * len(keys)
        todo = iter(range(len(keys)))

        def stream(lease: Lease, slots: Slots) -> None:
            assert slots is not None
            failed = self._read(live(todo, lease), keys, pages, statuses, lease, slots, beyond=self._beyond)
            present = self._explain(failed, keys, statuses)
            # once more, and no further than the object goes: a store may refuse what is beyond
            left = self._read(live(iter(present), lease), keys, pages, statuses, lease, slots, beyond=False)
            if len(left) < len(present):
                self._beyond = False
            for i in left:
                statuses[i] = Status.FAILED

        framed = [size + FRAME_NBYTES + len(_BEYOND) for size in sizes]
        in_time = self._readers.run(framed, MAX_OBJECTS, stream, direct=False)
        return _settled(statuses, in_time)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        sizes = [page_nbytes(page) for page in pages]
        statuses = [Status.TIMED_OUT] * len(keys)
        todo = iter(range(len(keys)))

        def stream(lease: Lease, slots: Slots) -> None:
            assert slots is not None
            used: dict[int, Buffer] = {}

            def start(i: int, _: bool) -> Move | None:
                piece = slots[-1].slice(0, sizes[i] + FRAME_NBYTES)
                try:
                    with lease.held():
                        copy(pages[i], [piece.slice(MARK_NBYTES, sizes[i])])
                except DeadlineError:
                    return None
                piece.view[:MARK_NBYTES] = piece.view[-MARK_NBYTES:] = mark(keys[i], sizes[i])
                used[i] = slots.pop()
                return Move([piece], self._target(keys[i]))

            def landed(i: int, error: StorageError | None) -> None:
                slots.append(used.pop(i))
                statuses[i] = Status.OK if error is None else Status.FAILED

            self._transfers.stream("WRITE", live(todo, lease), len(slots), start, landed)

        framed = [size + FRAME_NBYTES for size in sizes]
        in_time = self._writers.run(framed, MAX_OBJECTS, stream, direct=False)
        return _settled(statuses, in_time)

    def describe(self) -> dict[str, str]:
        told = self._agent.told
        shown = ("bucket", "container_name", "endpoint_override", "account_url", "region")
        return {name: told[name] for name in shown if name in told} | {"prefix": self._prefix}

    def close(self) -> None:
        for pool in (self._lookups, self._readers, self._writers):
            pool.close()
        self._memory.close()

    def _read(
        self,
        todo: Iterator[int],
        keys: Sequence[str],
        pages: Sequence[Page],
        statuses: list[Status],
        lease: Lease,
        slots: list[Buffer],
        beyond: bool,
    ) -> list[int]:
        """Read objects into their pages; returns the numbers of those that NIXL did not bring."""
        failed: list[int] = []
        used: dict[int, Buffer] = {}

        def start(i: int, _: bool) -> Move | None:
            used[i] = slot = slots.pop()
            nbytes = page_nbytes(pages[i]) + FRAME_NBYTES
            _wipe(slot.slice(0, nbytes))
            slot.slice(nbytes, len(_BEYOND)).view[:] = _BEYOND
            return Move([slot.slice(0, nbytes + len(_BEYOND) * beyond)], self._target(keys[i]))

        def landed(i: int, error: StorageError | None) -> None:
            slot = used.pop(i)
            if error is None:
                with contextlib.suppress(DeadlineError), lease.held():
                    statuses[i] = _unframed(keys[i], slot, pages[i])
            else:
                failed.append(i)
            slots.append(slot)

        self._transfers.stream("READ", todo, len(slots), start, landed)
        return failed

    def _explain(self, failed: Sequence[int], keys: Sequence[str], statuses: list[Status]) -> list[int]:
        """NIXL does not say why a read failed: settle what is missing, return what is there."""
        try:
            there = self._present([keys[i] for i in failed])
        except StorageError as error:
            logger.warning("%d objects are not read: %s", len(failed), error)
            for i in failed:
                statuses[i] = Status.FAILED
            return []
        for i, found in zip(failed, there, strict=True):
            if not found:
                statuses[i] = Status.MISSING
        return [i for i, found in zip(failed, there, strict=True) if found]

    def _present(self, keys: Sequence[str]) -> list[bool]:
        found: list[bool] = []
        for at in range(0, len(keys), ASKED_AT_ONCE):
            if time_left() == 0.0:
                raise DeadlineError("the store did not say in time")
            asked = [(0, 0, *self._target(key)) for key in keys[at : at + ASKED_AT_ONCE]]
            try:
                with inside(self._agent.api):
                    facts = self._agent.api.query_memory(
                        asked, self._agent.nixl_name, mem_type=self._agent.kind
                    )
            except self._agent.refusals as error:
                raise UnavailableError(f"the store cannot be asked: {error}") from error
            found += [fact is not None for fact in facts]
        return found

    def _head(self, key: str) -> bytes | None:
        """The mark that an object begins with; None when there is no object."""
        errors: list[StorageError | None] = []
        with self._memory.slots(MARK_NBYTES, 1) as (slot,):
            _wipe(slot)
            move = Move([slot], self._target(key))
            self._transfers.stream(
                "READ", iter([0]), 1, lambda *_: move, lambda _, error: errors.append(error)
            )
            if errors[0] is None:
                return bytes(slot.view)
        if self._present([key])[0]:
            raise errors[0]
        return None

    def _target(self, key: str) -> tuple[int, str]:
        return self._transfers.new_number(), self._prefix + key


def _wipe(piece: Buffer) -> None:
    piece.view[:MARK_NBYTES] = piece.view[-MARK_NBYTES:] = bytes(MARK_NBYTES)


def _unframed(key: str, slot: Buffer, page: Page) -> Status:
    """Copy what is between the marks to the page, if it is whole and nothing is behind it."""
    nbytes = page_nbytes(page)
    frame = mark(key, nbytes)
    ends = nbytes + FRAME_NBYTES
    stored = slot.slice(0, ends + len(_BEYOND)).view
    if stored[:MARK_NBYTES] != frame or stored[MARK_NBYTES + nbytes : ends] != frame:
        return Status.CORRUPT
    if stored[ends:] != _BEYOND:
        return Status.CORRUPT
    copy([slot.slice(MARK_NBYTES, nbytes)], page)
    return Status.OK


def _settled(statuses: list[Status], in_time: bool) -> list[Status]:
    """What to answer: a stream that is late goes on changing its own list."""
    late = Status.TIMED_OUT if not in_time else Status.FAILED
    return [late if status is Status.TIMED_OUT else status for status in statuses]
