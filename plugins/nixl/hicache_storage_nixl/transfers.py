"""Moves pages between registered memory and files or objects, several in flight at a time.

A handle a page, not one a batch: NIXL answers for a handle as a whole, so this is how one bad page
fails alone and how a page can be used while others are on their way. 128 handles cost half a
millisecond more than one (measured, NIXL 1.5.1), so handles prepared beforehand gain nothing.

NIXL has no time limits and cannot call a transfer off: a handle that is released in flight is
forgotten, and the data arrives all the same. So no handle is ever released before it is done,
whatever happens to the thread that waits for it.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hicache_storage import Buffer, BufferMismatchError, StorageError, UnavailableError
from hicache_storage_nixl.agent import Agent

MAX_DESCRIPTORS = 4096
"""Buffers in flight in one stream. The POSIX plugin has a pool of them; an agent that exceeds it is
lost for good (NIXL 1.5.1)."""

POLL_SECONDS = 0.0002, 0.005
"""How often a transfer is looked at: at first, and once it takes long. Looking is also what drives
the POSIX plugin on."""

Operation = Literal["READ", "WRITE"]


class CrowdedError(Exception):
    """A page cannot start now, but can when one that is in flight has landed."""


@dataclass(frozen=True, slots=True)
class Move:
    """One page on its way: from or to the start of a file or object."""

    memory: Sequence[Buffer]
    """Registered, and not empty."""
    target: tuple[int, str]
    """What NIXL calls device and meta information: a descriptor of a file, or a number and a key."""


@dataclass(frozen=True, slots=True)
class _Flight:
    handle: Any
    target: Any


class Transfers:
    """Thread-safe."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._api = agent.api
        self._only = [agent.nixl_name]
        pool = int(agent.told.get("ios_pool_size", 65536))
        self.max_descriptors = min(MAX_DESCRIPTORS, pool // 2)
        self._room = threading.BoundedSemaphore(max(1, pool // self.max_descriptors - 1))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._registered: dict[Buffer, Any] = {}
        self._streams = 0

    def new_number(self) -> int:
        """A number that no other target has; NIXL refuses to register the same one twice."""
        return next(self._numbers)

    def register(self, memory: Buffer) -> None:
        """Announce memory that pages will lie in. Raises UnavailableError."""
        if memory.nbytes == 0:
            return
        region = (memory.address, memory.nbytes, 0, "")
        try:
            known = self._api.register_memory(self._api.get_reg_descs([region], "DRAM"), backends=self._only)
        except self._agent.refusals as error:
            raise UnavailableError(
                f"NIXL does not register {memory.nbytes} bytes of memory: {error}"
            ) from error
        with self._lock:
            self._registered[memory] = known

    def unregister(self, memory: Buffer) -> None:
        """Take ``register`` back; memory that is not registered is passed over."""
        with self._lock:
            known = self._registered.pop(memory, None)
        if known is not None:
            self._api.deregister_memory(known, backends=self._only)

    def stream(
        self,
        operation: Operation,
        todo: Iterator[int],
        width: int,
        start: Callable[[int, bool], Move | None],
        landed: Callable[[int, StorageError | None], None],
    ) -> None:
        """Move the pages with the numbers ``todo``, ``width`` at a time, and return when all have landed.

        ``start(number, alone)`` makes a page ready, or deals with it by itself and returns None. It may
        raise CrowdedError unless it is ``alone``. ``landed(number, error)`` is told what became of a
        page: None, UnavailableError, or BufferMismatchError for memory that is not registered. What
        either raises ends the stream, once all that is in flight has landed.
        """
        flying: dict[int, _Flight] = {}
        waiting: int | None = None
        with self._room:
            with self._lock:
                self._streams += 1
            try:
                while True:
                    while len(flying) < width:
                        number = waiting if waiting is not None else next(todo, None)
                        waiting = None
                        if number is None:
                            break
                        try:
                            move = start(number, not flying)
                        except CrowdedError:
                            waiting = number
                            break
                        if move is not None:
                            self._post(operation, number, move, flying, landed)
                    if not flying:
                        return
                    self._land(flying, landed)
            finally:
                if flying:  # whatever ended it: memory of a transfer in flight is not the caller's yet
                    self._land(flying, lambda *_: None, until_empty=True)
                with self._lock:
                    self._streams -= 1

    def close(self) -> None:
        """Unregister what is left, unless a stream hangs: then that is for the agent to do, when it ends."""
        with self._lock:
            left = [] if self._streams else list(self._registered)
        for memory in left:
            self.unregister(memory)

    def _post(
        self,
        operation: Operation,
        number: int,
        move: Move,
        flying: dict[int, _Flight],
        landed: Callable[[int, StorageError | None], None],
    ) -> None:
        try:
            flight = self._prepared(operation, move)
        except (UnavailableError, BufferMismatchError) as error:
            landed(number, error)
            return
        flying[number] = flight
        state = self._state(self._api.transfer, flight)
        if state != "PROC":
            del flying[number]
            self._release(flight)
            landed(number, _failure(state))

    def _prepared(self, operation: Operation, move: Move) -> _Flight:
        """Raises UnavailableError, BufferMismatchError."""
        memory, region, nbytes = [], [], 0
        for buffer in move.memory:
            memory.append((buffer.address, buffer.nbytes, 0))
            region.append((nbytes, buffer.nbytes, move.target[0]))
            nbytes += buffer.nbytes
        kind = self._agent.kind
        try:
            target = self._api.register_memory(
                self._api.get_reg_descs([(0, nbytes, *move.target)], kind), backends=self._only
            )
        except self._agent.refusals as error:
            raise UnavailableError(f"NIXL does not take a {kind}: {error}") from error
        try:
            handle = self._api.initialize_xfer(
                operation,
                self._api.get_xfer_descs(memory, "DRAM"),
                self._api.get_xfer_descs(region, kind),
                self._api.name,
                backends=self._only,
            )
        except self._agent.refusals as error:
            self._api.deregister_memory(target, backends=self._only)
            if isinstance(error, self._agent.unregistered):
                raise BufferMismatchError(
                    f"a page of {nbytes} bytes lies outside the memory that register_buffer announced"
                ) from error
            raise UnavailableError(f"NIXL does not prepare a transfer: {error}") from error
        return _Flight(handle, target)

    def _land(
        self,
        flying: dict[int, _Flight],
        landed: Callable[[int, StorageError | None], None],
        until_empty: bool = False,
    ) -> None:
        """Wait until one has landed, or all."""
        started = time.monotonic()
        first, longest = POLL_SECONDS
        some = False
        while flying:
            for number, flight in list(flying.items()):
                state = self._state(self._api.check_xfer_state, flight)
                if state != "PROC":
                    some = True
                    del flying[number]
                    self._release(flight)
                    landed(number, _failure(state))
            if some and not until_empty:
                return
            if flying:
                time.sleep(min(longest, max(first, (time.monotonic() - started) / 50)))

    def _state(self, ask: Callable[[Any], Any], flight: _Flight) -> str:
        try:
            return str(ask(flight.handle))
        except self._agent.refusals:
            return "ERR"

    def _release(self, flight: _Flight) -> None:
        self._api.release_xfer_handle(flight.handle)
        self._api.deregister_memory(flight.target, backends=self._only)


def _failure(state: str) -> UnavailableError | None:
    return None if state == "DONE" else UnavailableError("NIXL reports an error of the transfer")
