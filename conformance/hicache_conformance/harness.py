"""What a case works with: clients of the store, page memory, other processes, a way to do damage."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hicache_conformance.corruptors import Corruptor, corruptor_for
from hicache_conformance.history import Client, History
from hicache_conformance.oracle import page_content
from hicache_conformance.other_process import OtherProcess
from hicache_conformance.outcomes import (
    BrokenPromiseError,
    UnsupportedCaseError,
    expect_statuses,
    require,
)
from hicache_conformance.pages import GuardedPages
from hicache_conformance.target import Target
from hicache_storage import Capabilities, HiCacheStorage, Namespace, Status

SMALL = "small"
"""A need: the suite can open the store with little room."""
TORCH = "torch"
"""A need: PyTorch is installed (gloo ranks, the tier engine)."""

MHA = (4096, 4096)
"""Buffer sizes of a small MHA page: K and V."""


def missing(needs: Sequence[str], capabilities: Capabilities, target: Target) -> str | None:
    """Why a case with these needs is unsupported, or None."""
    for need in needs:
        if need == SMALL:
            if not target.can_be_small:
                return "the backend has no setting 'capacity' to give it little room with"
        elif need == TORCH:
            if find_spec("torch") is None:
                return "PyTorch is not installed"
        elif not getattr(capabilities, need):
            return f"the backend does not declare the capability {need!r}"
    return None


class Harness:
    """One case's view of the target. Everything it hands out is closed when the case ends."""

    def __init__(self, target: Target, capabilities: Capabilities, case: str, seed: int, tmp: Path) -> None:
        self.target = target
        self.capabilities = capabilities
        self.seed = seed
        self.tmp = tmp
        self.rng = random.Random(f"{seed}/{case}")
        self.history = History()
        # unlike names, namespaces differ between runs: a real store keeps what the last run left
        self.namespace = Namespace(model="hicache-conformance", tenant=uuid.uuid4().hex)
        self._cleanup = ExitStack()
        self._clients = 0

    def open(self, namespace: Namespace | None = None, **own: Any) -> Client:
        """A bare client of the store, with no layer in front. ``own`` are settings on top."""
        storage = self.target.open(self.tmp, namespace or self.namespace, **own)
        return self._client(storage, storage, named=False)

    def stack(
        self,
        wrap: Callable[[HiCacheStorage], HiCacheStorage] | None = None,
        namespace: Namespace | None = None,
        **sdk: Any,
    ) -> Client:
        """A client behind all of the SDK's layers, as SGLang gets it.

        ``wrap`` puts something between the backend and the layers. ``sdk`` are SDK settings on top.
        """
        settings, own = self.target.settings(self.tmp)
        storage = self.target.cls(own, namespace or self.namespace)
        name = self.target.backend
        below = storage if wrap is None else wrap(storage)
        layers = self.target.stack(below, settings.model_copy(update=sdk), name)
        return self._client(layers, storage, named=True)

    def process(self, namespace: Namespace | None = None, **own: Any) -> OtherProcess:
        """A client in another process."""
        other = OtherProcess(self.target, self.tmp, namespace or self.namespace, self.history, own)
        self._cleanup.callback(other.close)
        return other

    def corruptor(self, client: Client) -> Corruptor:
        """A way to damage what ``client`` has stored, below all layers."""
        return corruptor_for(self.target.backend, client.backend)

    def names(self, count: int) -> list[str]:
        """Fresh page names that look like SGLang's page hashes."""
        return [self.rng.randbytes(32).hex() for _ in range(count)]

    def memory(
        self, client: Client, count: int, buffers: Sequence[int] = MHA, misalign: int = 0
    ) -> GuardedPages:
        """Guarded pages in memory that is registered with ``client`` until the case ends."""
        memory = GuardedPages(count, buffers, misalign)
        client.register_buffer(memory.region)
        self._cleanup.callback(client.unregister_buffer, memory.region)
        return memory

    def filled(
        self, client: Client, names: Sequence[str], buffers: Sequence[int] = MHA, misalign: int = 0
    ) -> GuardedPages:
        """Memory that holds the content of the pages of these names."""
        memory = self.memory(client, len(names), buffers, misalign)
        for number, name in enumerate(names):
            memory.write(number, page_content(name, sum(buffers)))
        return memory

    def store(self, client: Client, names: Sequence[str], buffers: Sequence[int] = MHA) -> GuardedPages:
        """Store the pages of these names; all of them must be OK."""
        memory = self.filled(client, names, buffers)
        statuses = client.batch_set_from(client.keys(names), memory.pages)
        expect_statuses(statuses, [Status.OK] * len(names), "batch_set_from")
        return memory

    def check(
        self,
        client: Client,
        names: Sequence[str],
        wanted: Sequence[Status | set[Status]] | None = None,
        buffers: Sequence[int] = MHA,
        misalign: int = 0,
    ) -> list[Status]:
        """Read these pages: each has its wanted status (default OK), and OK means its very bytes."""
        memory = self.memory(client, len(names), buffers, misalign)
        memory.blank()
        statuses = client.batch_get_into(client.keys(names), memory.pages)
        expect_statuses(statuses, wanted or [Status.OK] * len(names), "batch_get_into")
        for number, (name, status) in enumerate(zip(names, statuses, strict=True)):
            if status:
                found, right = memory.content(number), page_content(name, sum(buffers))
                if found != right:
                    raise BrokenPromiseError(
                        f"page {number} of {len(names)} has wrong bytes: {_difference(found, right)}"
                    )
        require(memory.guards_intact(), "batch_get_into wrote outside the pages")
        return statuses

    def defer(self, release: Callable[[], object]) -> None:
        """Call ``release`` when the case ends, before anything opened earlier is closed."""
        self._cleanup.callback(release)

    def finish(self) -> None:
        """Close all that was handed out, newest first. Raises what a backend raises on close."""
        self._cleanup.close()

    def unsupported(self, reason: str) -> UnsupportedCaseError:
        """To raise when only trying can tell that the backend cannot do what the case needs."""
        return UnsupportedCaseError(reason)

    def _client(self, storage: HiCacheStorage, backend: HiCacheStorage, *, named: bool) -> Client:
        self._clients += 1
        kind = "stack" if named else "client"
        name = f"{kind}{self._clients}"
        client = Client(storage, backend, self.history, name, named=named)
        self._cleanup.callback(client.close)
        return client


def _difference(found: bytes, right: bytes) -> str:
    if not any(found):
        return "all zeros"
    step = 4096
    start = next(i for i in range(0, len(right), step) if found[i : i + step] != right[i : i + step])
    first = next(i for i in range(start, len(right)) if found[i] != right[i])
    return f"the first of {len(right)} that is wrong is byte {first}"
