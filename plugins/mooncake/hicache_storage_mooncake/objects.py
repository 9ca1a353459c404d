"""Objects in Mooncake's codes: what it answers, asked again where that pays, not believed where it lies."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from hicache_storage import Buffer, time_left
from hicache_storage.buffers import copy
from hicache_storage.layers.breaker import KeyMemory
from hicache_storage_mooncake import batches, codes
from hicache_storage_mooncake.client import Client

LOST_KEYS = 65_536
STALE_SECONDS = 60.0
"""A put on a key that is there does nothing, although its bytes may be gone with their owner. For this
long after it could not be read, such a key is removed before it is stored.
"""
UNFINISHED_SECONDS = 0.3
"""How long a page that another client is writing is waited for before it counts as abandoned."""
FULL_SECONDS = 5.0
"""After the store stayed full for all of ``patience``, writes are not tried twice for this long."""


class Objects:
    """Thread-safe. To be called only while the client is in use, so from inside the storage's gate.

    ``config`` goes with each put. ``closing`` ends what waits. A store that is full is asked again for
    ``patience`` seconds; an object that could not be read is absent for ``lost`` seconds.
    """

    def __init__(
        self, client: Client, config: Any, closing: threading.Event, *, patience: float, lost: float
    ) -> None:
        self._client = client
        self._config = config
        self._closing = closing
        self._patience = patience
        self._lost = KeyMemory(lost, LOST_KEYS)
        self._stale = KeyMemory(STALE_SECONDS, LOST_KEYS)
        self._full_until = 0.0

    @property
    def lost(self) -> int:
        """How many objects count as absent because they could not be read lately."""
        return len(self._lost)

    def size(self, key: str) -> int:
        """The object's size in bytes, or a code."""
        if key in self._lost:
            return codes.NOT_FOUND
        return self._one(lambda: self._client.store.get_size(key))

    def present(self, keys: Sequence[str]) -> list[int]:
        """EXISTS, OK for no, or a code, of each key."""
        found = self._ask(lambda: self._client.store.batch_is_exist(list(keys)), len(keys))
        return [codes.OK if key in self._lost else code for key, code in zip(keys, found, strict=True)]

    def read(
        self, keys: Sequence[str], addresses: Sequence[list[int]], sizes: Sequence[list[int]]
    ) -> list[int]:
        """The size of each object, or a code; it was read if that is the size that was asked for."""
        got = [codes.NOT_FOUND] * len(keys)
        there = [i for i, key in enumerate(keys) if key not in self._lost]
        wanted = [sizes[i] for i in there]
        get = self._client.store.batch_get_into_multi_buffers
        for part in batches.parts(wanted):
            call = partial(
                get, [keys[i] for i in there[part]], [addresses[i] for i in there[part]], wanted[part]
            )
            for i, code in zip(there[part], self._ask(call, len(there[part])), strict=True):
                got[i] = code
        return [
            self._unread(key, code, sum(size)) if code in (codes.INVALID, codes.TRANSFER_FAILED) else code
            for key, code, size in zip(keys, got, sizes, strict=True)
        ]

    def write(self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> list[int]:
        """The codes of storing these objects; a store that is full, or lost an owner, is asked again."""
        stale = [key for key in keys if key in self._stale] if len(self._stale) else []
        if stale:
            self.remove(stale)
        ends_at = self._patience_ends_at()
        pause = 0.02
        done = self._look(keys)
        unfinished = [i for i, code in enumerate(done) if code == codes.NOT_READY]
        todo = [i for i, code in enumerate(done) if code in codes.ABSENT and code != codes.NOT_READY]
        while todo:
            put = self._put([keys[i] for i in todo], [addresses[i] for i in todo], [sizes[i] for i in todo])
            for i, code in zip(todo, put, strict=True):
                done[i] = code
            todo = [i for i in todo if done[i] in codes.WORTH_RETRYING]
            if todo and (time.monotonic() + pause > ends_at or self._closing.wait(pause)):
                break
            pause = min(2 * pause, 0.2)
        if codes.NO_ROOM in done:
            self._full_until = time.monotonic() + FULL_SECONDS
        for i in unfinished:
            done[i] = self._finish(keys[i], addresses[i], sizes[i])
        self._forget([key for key, code in zip(keys, done, strict=True) if code == codes.OK])
        return done

    def remove(self, keys: Sequence[str]) -> list[int]:
        """The codes of removing these objects, leased ones too."""
        removed = self._ask(lambda: self._client.store.batch_remove(list(keys), True), len(keys))
        self._forget(keys)
        return removed

    def remove_matching(self, regex: str) -> int:
        """How many objects with such keys were removed, or a code.

        Without force Mooncake skips what was looked up lately, and says nothing.
        """
        return self._one(lambda: self._client.store.remove_by_regex(regex, True))

    @contextmanager
    def registered(self, memory: mmap.mmap) -> Iterator[Buffer]:
        """Memory of our own for one object, known to Mooncake while inside."""
        buffer = Buffer.of(memory)
        self._client.register(buffer)
        try:
            yield buffer
        finally:
            self._client.unregister(buffer)

    def _unread(self, key: str, code: int, nbytes: int) -> int:
        """Why an object was not read: the size that it has, if that is another, else its code.

        One whose owner is gone exists and cannot be read until the master notices.
        """
        stored = self._client.store.get_size(key)
        if stored >= 0 and stored != nbytes:
            return int(stored)
        if code != codes.TRANSFER_FAILED:
            return code
        self._lost.add([key])
        self._stale.add([key])
        return codes.NOT_FOUND

    def _look(self, keys: list[str]) -> list[int]:
        """OK, NOT_FOUND or NOT_READY of each key, or why the master could not be asked.

        A put would say OK to all three. What is absent gets no lease by this.
        """
        found = self._ask(partial(self._client.store.batch_get_session_start, keys), len(keys))
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
            if self._closing.wait(0.01):
                break
        if code >= codes.OK or code not in codes.ABSENT:
            return min(code, codes.OK)
        whole = mmap.mmap(-1, sum(sizes))
        copy([Buffer(*piece) for piece in zip(addresses, sizes, strict=True)], [Buffer.of(whole)])
        with self.registered(whole) as buffer:
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

    def _patience_ends_at(self) -> float:
        """Until when a full store is asked again; half of the deadline is left for the others."""
        now = time.monotonic()
        if now < self._full_until:
            return now
        left = time_left()
        return now + (self._patience if left is None else min(self._patience, left / 2))

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
