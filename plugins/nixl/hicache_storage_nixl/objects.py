"""Pages as objects of a store that NIXL talks to: S3 and Azure.

An object is moved in one piece, out of memory of our own: NIXL puts every descriptor of a list as
an object by itself. NIXL reports an object that is too short as read, with what was in memory before
as its tail, and tells nobody how large an object is. So every object is framed: the same mark, made
of its key and size, stands before and behind its content. Both are wiped from memory before a read,
and only the whole object of this key brings them back. That holds with the integrity layer and
without; damage between the marks is what its checksum finds.
"""

from __future__ import annotations

import logging
import mmap
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import xxhash

from hicache_storage import (
    Buffer,
    Capabilities,
    CorruptError,
    Page,
    Status,
    StorageError,
    UnavailableError,
    page_nbytes,
)
from hicache_storage.buffers import copy
from hicache_storage_nixl.agent import Agent
from hicache_storage_nixl.settings import NixlSettings
from hicache_storage_nixl.transfers import Move, Transfers

logger = logging.getLogger(__name__)

PIECE_NBYTES = 16 << 20
"""Memory of one call in progress. Batches are cut to fit, unless one page alone is larger."""

_MARK = struct.Struct("<8sQ16s")
MARK_NBYTES = _MARK.size


def mark(key: str, nbytes: int) -> bytes:
    """What stands before and behind ``nbytes`` bytes of content under ``key``."""
    return _MARK.pack(b"HICNIXL\x01", nbytes, xxhash.xxh3_128_digest(key.encode()))


class Objects:
    """Thread-safe. Calls take as long as the store takes."""

    # no delete: NIXL has none, and by contract such a backend overwrites
    capabilities = Capabilities(persistent=True, shared=True)

    def __init__(self, settings: NixlSettings, agent: Agent, transfers: Transfers) -> None:
        self._prefix = settings.prefix
        self._agent = agent
        self._transfers = transfers
        self._memory = _Memory(transfers)

    def get(self, key: str) -> bytearray | None:
        with self._memory.pieces([MARK_NBYTES]) as (head,):
            if self._read([key], [head]) != [Status.OK]:
                if self.batch_exists([key])[0]:
                    raise UnavailableError(f"{key} cannot be read")
                return None
            _, nbytes, _ = _MARK.unpack(head.view)
            if head.view != mark(key, nbytes):
                raise CorruptError(f"what is stored under {key} is no page")
        value = bytearray(nbytes)
        status = self.batch_get_into([key], [(Buffer.of(value),)])[0]
        if status is Status.CORRUPT:
            raise CorruptError(f"the object under {key} is not whole")
        return value if status else None

    def set(self, key: str, value: memoryview) -> None:
        content = memoryview(value).cast("B")
        with self._memory.pieces([content.nbytes + 2 * MARK_NBYTES]) as (piece,):
            _content(piece).view[:] = content
            if not self._write([key], [piece])[0]:
                raise UnavailableError(f"the store does not take {key}")

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        """Raises UnavailableError when the store does not say."""
        asked = [(0, 0, self._transfers.new_number(), self._prefix + key) for key in keys]
        try:
            found = self._agent.api.query_memory(asked, self._agent.nixl_name, mem_type=self._agent.kind)
        except self._agent.refusals as error:
            raise UnavailableError(f"the store cannot be asked: {error}") from error
        return [facts is not None for facts in found]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses: list[Status] = []
        for part in _cut(pages):
            with self._memory.pieces(_framed(pages[part])) as pieces:
                for key, page, piece, status in zip(
                    keys[part], pages[part], pieces, self._read(keys[part], pieces), strict=True
                ):
                    frame = mark(key, page_nbytes(page))
                    whole = piece.view[:MARK_NBYTES] == frame == piece.view[-MARK_NBYTES:]
                    if status and whole:
                        copy((_content(piece),), page)
                    statuses.append(Status.CORRUPT if status and not whole else status)
        return statuses

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses: list[Status] = []
        for part in _cut(pages):
            with self._memory.pieces(_framed(pages[part])) as pieces:
                for page, piece in zip(pages[part], pieces, strict=True):
                    copy(page, (_content(piece),))
                written = self._write(keys[part], pieces)
            statuses += [Status.OK if done else Status.FAILED for done in written]
        return statuses

    def describe(self) -> dict[str, str]:
        told = self._agent.told
        return {
            name: told[name]
            for name in ("bucket", "container_name", "endpoint_override", "account_url", "region")
            if name in told
        } | {"prefix": self._prefix}

    def close(self) -> None:
        self._memory.close()

    def _read(self, keys: Sequence[str], pieces: Sequence[Buffer]) -> list[Status]:
        for piece in pieces:
            piece.view[:MARK_NBYTES] = bytes(MARK_NBYTES)
            piece.view[-MARK_NBYTES:] = bytes(MARK_NBYTES)
        arrived = self._transfers.run("READ", self._moves(keys, pieces))
        absent = [key for key, there in zip(keys, arrived, strict=True) if not there]
        missing: set[str] = set()
        if absent:  # NIXL does not say why: is it not there, or is the store at fault?
            try:
                there = self.batch_exists(absent)
                missing = {key for key, found in zip(absent, there, strict=True) if not found}
            except StorageError as error:
                logger.warning("%d objects are not read: %s", len(absent), error)
        return [
            Status.OK if there else Status.MISSING if key in missing else Status.FAILED
            for key, there in zip(keys, arrived, strict=True)
        ]

    def _write(self, keys: Sequence[str], pieces: Sequence[Buffer]) -> list[bool]:
        for key, piece in zip(keys, pieces, strict=True):
            frame = mark(key, piece.nbytes - 2 * MARK_NBYTES)
            piece.view[:MARK_NBYTES] = frame
            piece.view[-MARK_NBYTES:] = frame
        return self._transfers.run("WRITE", self._moves(keys, pieces))

    def _moves(self, keys: Sequence[str], pieces: Sequence[Buffer]) -> list[Move]:
        return [
            Move((piece,), piece.nbytes, (self._transfers.new_number(), self._prefix + key))
            for key, piece in zip(keys, pieces, strict=True)
        ]


class _Memory:
    """Registered memory, taken for the time of a call; as much as calls at a time need."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        self._free: list[Buffer] = []

    @contextmanager
    def pieces(self, sizes: Sequence[int]) -> Iterator[list[Buffer]]:
        """One buffer a size, one behind the other."""
        offsets = [0, *accumulate(sizes)]
        whole = self._take(max(offsets[-1], PIECE_NBYTES))
        try:
            yield [whole.slice(offset, size) for offset, size in zip(offsets, sizes, strict=False)]
        finally:
            with self._lock:
                self._free.append(whole)

    def close(self) -> None:
        with self._lock:
            free, self._free = self._free, []
        for whole in free:
            self._transfers.unregister(whole)

    def _take(self, nbytes: int) -> Buffer:
        with self._lock:
            for i, whole in enumerate(self._free):
                if whole.nbytes >= nbytes:
                    return self._free.pop(i)
            smaller = self._free.pop() if self._free else None
        if smaller is not None:
            self._transfers.unregister(smaller)
        whole = Buffer.of(mmap.mmap(-1, nbytes))
        self._transfers.register(whole)
        return whole


def _content(piece: Buffer) -> Buffer:
    return piece.slice(MARK_NBYTES, piece.nbytes - 2 * MARK_NBYTES)


def _framed(pages: Sequence[Page]) -> list[int]:
    return [page_nbytes(page) + 2 * MARK_NBYTES for page in pages]


def _cut(pages: Sequence[Page]) -> Iterator[slice]:
    """Parts of a batch that fit into PIECE_NBYTES."""
    start, nbytes = 0, 0
    for i, size in enumerate(_framed(pages)):
        if i > start and nbytes + size > PIECE_NBYTES:
            yield slice(start, i)
            start, nbytes = i, 0
        nbytes += size
    if start < len(pages):
        yield slice(start, len(pages))
