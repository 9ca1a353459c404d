"""Moves batches between registered memory and files or objects: one handle a page, waited out.

A handle a page, not one a batch: NIXL answers for a handle as a whole, so this is how one bad page
fails alone, and 128 handles cost half a millisecond more than one (measured, NIXL 1.5.1). For the
same reason nothing is gained by handles prepared beforehand.

NIXL has no time limits and cannot call a transfer off: a handle that is released in flight is
forgotten, and the data arrives all the same. So no handle is ever released before it is done. A
transfer that hangs keeps its thread and its memory; that is why this backend is not ``bounded`` and
works, under the deadline layer, on memory that belongs to the layer and not to the caller.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hicache_storage import Buffer, BufferMismatchError, UnavailableError
from hicache_storage_nixl.agent import Agent

MAX_DESCRIPTORS = 4096
"""Descriptors of one batch. The POSIX plugin has a pool of them; an agent that exceeds it is lost."""

POLL_SECONDS = 0.0002, 0.005
"""How often a transfer is looked at: at first, and once it takes long. Looking is also what drives
the POSIX plugin on."""

Operation = Literal["READ", "WRITE"]


@dataclass(frozen=True, slots=True)
class Move:
    """One page on its way: from or to the start of a file or object."""

    memory: Sequence[Buffer]
    """Registered, and not empty."""
    nbytes: int
    target: tuple[int, str]
    """What NIXL calls device and meta information: a descriptor of a file, or a number and a key."""


class Transfers:
    """Thread-safe. Calls take as long as the store takes."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._api = agent.api
        pool = int(agent.told.get("ios_pool_size", 65536))
        self.max_descriptors = min(MAX_DESCRIPTORS, pool // 2)
        self._room = threading.BoundedSemaphore(max(1, pool // self.max_descriptors - 1))
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._registered: dict[Buffer, Any] = {}

    def new_number(self) -> int:
        """A number that no other target has; NIXL refuses to register the same one twice."""
        return next(self._numbers)

    def register(self, memory: Buffer) -> None:
        """Announce memory that pages will lie in. Raises UnavailableError."""
        if memory.nbytes == 0:
            return
        try:
            known = self._api.register_memory(
                self._api.get_reg_descs([(memory.address, memory.nbytes, 0, "")], "DRAM"),
                backends=[self._agent.nixl_name],
            )
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
            self._api.deregister_memory(known, backends=[self._agent.nixl_name])

    def run(self, operation: Operation, moves: Sequence[Move]) -> list[bool]:
        """Move the pages, ``max_descriptors`` buffers at most, and say which of them arrived.

        Raises UnavailableError when NIXL takes none of them, BufferMismatchError for memory that is
        not registered. When either is raised nothing is in flight.
        """
        if not moves:
            return []
        with self._room:
            targets = self._register_targets(moves)
            try:
                return self._run(operation, moves)
            finally:
                self._api.deregister_memory(targets, backends=[self._agent.nixl_name])

    def close(self) -> None:
        """Unregister what is left; no call may be in progress."""
        with self._lock:
            left = list(self._registered)
        for memory in left:
            self.unregister(memory)

    def _register_targets(self, moves: Sequence[Move]) -> Any:
        regions = [(0, move.nbytes, *move.target) for move in moves]
        try:
            return self._api.register_memory(
                self._api.get_reg_descs(regions, self._agent.kind), backends=[self._agent.nixl_name]
            )
        except self._agent.refusals as error:
            raise UnavailableError(f"NIXL does not take {len(moves)} {self._agent.kind}s: {error}") from error

    def _run(self, operation: Operation, moves: Sequence[Move]) -> list[bool]:
        handles = [self._prepared(operation, move) for move in moves]
        done = [False] * len(moves)
        flying: dict[int, Any] = {}
        try:
            for i, handle in enumerate(handles):
                state = self._state(self._api.transfer, handle)
                if state == "PROC":
                    flying[i] = handle
                done[i] = state == "DONE"
        finally:
            # whatever interrupts this thread: memory of a transfer in flight is not the caller's yet
            self._wait(flying, done)
            for handle in handles:
                self._api.release_xfer_handle(handle)
        return done

    def _prepared(self, operation: Operation, move: Move) -> Any:
        memory, target, offset = [], [], 0
        for buffer in move.memory:
            memory.append((buffer.address, buffer.nbytes, 0))
            target.append((offset, buffer.nbytes, move.target[0]))
            offset += buffer.nbytes
        try:
            return self._api.initialize_xfer(
                operation,
                self._api.get_xfer_descs(memory, "DRAM"),
                self._api.get_xfer_descs(target, self._agent.kind),
                self._api.name,
                backends=[self._agent.nixl_name],
            )
        except self._agent.unregistered as error:
            raise BufferMismatchError(
                f"a page of {move.nbytes} bytes lies outside the memory that register_buffer announced"
            ) from error
        except self._agent.refusals as error:
            raise UnavailableError(f"NIXL does not prepare a transfer: {error}") from error

    def _wait(self, flying: dict[int, Any], done: list[bool]) -> None:
        started = time.monotonic()
        first, longest = POLL_SECONDS
        while flying:
            for i, handle in list(flying.items()):
                state = self._state(self._api.check_xfer_state, handle)
                if state != "PROC":
                    done[i] = state == "DONE"
                    del flying[i]
            if flying:
                time.sleep(min(longest, max(first, (time.monotonic() - started) / 50)))

    def _state(self, ask: Any, handle: Any) -> str:
        try:
            return str(ask(handle))
        except self._agent.refusals:
            return "ERR"
