"""The state machines behind the group ``stateful``: a store, and a dict that says what it must hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.outcomes import expect_presence
from hicache_storage import Status

SHAPES = ((64,), (4096, 4096), (1000, 24))
PLACES = 8
"""Page names of one program; each has its own shape."""

somewhere = st.lists(st.integers(0, PLACES - 1), min_size=1, max_size=6)
spaces = st.sampled_from((0, 0, 0, 1))


class StoreMachine(RuleBasedStateMachine):
    """Bare clients of one store in two namespaces. ``harness`` is bound by a subclass."""

    harness: ClassVar[Harness]
    programs: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        h = self.harness
        type(self).programs += 1
        # each program has a store of its own as far as it can tell
        base = replace(h.namespace, tenant=f"{h.namespace.tenant}-{self.programs}")
        self.spaces = [base, replace(base, epoch=1)]
        self.names = [f"{number:02d}-{name}" for number, name in enumerate(h.names(PLACES))]
        self.model: list[set[str]] = [set(), set()]
        self.clients = self.open_clients()

    def open_clients(self) -> list[Client]:
        """A client a namespace."""
        return [self.harness.open(space) for space in self.spaces]

    def shape(self, name: str) -> tuple[int, ...]:
        """The buffers of the page of this name."""
        return SHAPES[int(name[:2]) % len(SHAPES)]

    def teardown(self) -> None:
        """Close the program's clients; its pages stay with the store."""
        for client in self.clients:
            client.close()

    @rule(where=somewhere, space=spaces)
    def store(self, where: list[int], space: int) -> None:
        """Set pages; they are there from now on."""
        for shape, names in self._by_shape(where):
            self.harness.store(self.clients[space], names, shape)
            self.model[space] |= set(names)

    @rule(where=somewhere, space=spaces)
    def read(self, where: list[int], space: int) -> None:
        """Read pages: hits and misses are those of the model."""
        for shape, names in self._by_shape(where):
            wanted = [Status.OK if name in self.model[space] else Status.MISSING for name in names]
            self.harness.check(self.clients[space], names, wanted, shape)

    @rule(where=somewhere, space=spaces)
    def look_up(self, where: list[int], space: int) -> None:
        """Look pages up: those of the model are there."""
        names = [self.names[i] for i in where]
        client = self.clients[space]
        wanted = [name in self.model[space] for name in names]
        expect_presence(client.batch_exists(client.keys(names)), wanted, "batch_exists")

    @precondition(lambda self: self.harness.capabilities.delete)
    @rule(where=somewhere, space=spaces)
    def delete(self, where: list[int], space: int) -> None:
        """Delete pages, there or not."""
        names = [self.names[i] for i in where]
        self.clients[space].delete(self.clients[space].keys(names))
        self.model[space] -= set(names)

    @precondition(lambda self: self.harness.capabilities.clear)
    @rule(space=spaces)
    def clear(self, space: int) -> None:
        """Clear one namespace; the other keeps its pages."""
        self.clients[space].clear()
        self.model[space].clear()

    @precondition(lambda self: self.harness.capabilities.persistent)
    @rule()
    def reopen(self) -> None:
        """Close everything and open it again."""
        self.teardown()
        self.clients = self.open_clients()

    @precondition(lambda self: self.harness.capabilities.shared)
    @rule(space=spaces)
    def replace_client(self, space: int) -> None:
        """Go on with a second client of the same store."""
        old = self.clients[space]
        self.clients[space] = self.open_clients()[space]
        old.close()

    def _by_shape(self, where: list[int]) -> list[tuple[tuple[int, ...], list[str]]]:
        """The places as batches of one shape each, in a fixed order."""
        names = [self.names[i] for i in where]
        found = {shape: [name for name in names if self.shape(name) == shape] for shape in SHAPES}
        return [(shape, of_shape) for shape, of_shape in found.items() if of_shape]


class StackMachine(StoreMachine):
    """The same behind the SDK's layers, and objects get damaged."""

    def open_clients(self) -> list[Client]:
        limits: dict[str, Any] = {"exists_seconds": 20, "get_seconds": 20, "set_seconds": 20}
        return [self.harness.stack(namespace=space, **limits) for space in self.spaces]

    @rule(place=st.integers(0, PLACES - 1), space=spaces, at=st.integers(0, 10**6), cut=st.booleans())
    def damage(self, place: int, space: int, at: int, cut: bool) -> None:
        """Flip a byte of a stored object, or cut it; reading it is a miss once, and from then on."""
        name, client = self.names[place], self.clients[space]
        if name not in self.model[space]:
            return
        backdoor = self.harness.corruptor(client)
        key = self.spaces[space].key(name)
        raw = bytearray(backdoor.read(key) or b"?")
        raw[at % len(raw)] ^= 0xFF
        backdoor.write(key, bytes(raw[: at % len(raw)] if cut else raw))
        bad = {Status.CORRUPT, Status.MISSING, Status.FAILED}
        self.harness.check(client, [name], [bad], self.shape(name))
        if client.capabilities.delete:
            self.model[space].discard(name)
        else:  # without delete it goes on existing, and misses, until it is set again
            self.harness.store(client, [name], self.shape(name))


class KillMachine(StoreMachine):
    """The same, and other processes that write to the store are killed."""

    kills = 0

    @precondition(lambda self: self.kills < 2)
    @rule(shape=st.sampled_from(SHAPES))
    def kill_a_writer(self, shape: tuple[int, ...]) -> None:
        """Start a writer in this namespace, kill it; what it was told is stored must be there."""
        self.kills += 1
        other = self.harness.process(self.spaces[0])
        other.start("stream", prefix=f"kill{self.kills}", buffers=list(shape), batch=4)
        stored = [other.answer(), *other.kill()]
        self.harness.check(self.clients[0], stored, buffers=shape)
