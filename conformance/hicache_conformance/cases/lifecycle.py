"""Lifecycle: open, close, clear, fork; what is left behind and what is not."""

from __future__ import annotations

import gc
import os
import threading
import time
import tracemalloc
from dataclasses import replace

from hicache_conformance.case import case
from hicache_conformance.harness import MHA, Harness
from hicache_conformance.history import Client
from hicache_conformance.outcomes import expect, expect_error, expect_presence, expect_statuses, require
from hicache_conformance.pages import GuardedPages
from hicache_storage import ClosedError, Status, StorageError, UnsupportedError

CYCLES = 100


@case("lifecycle", needs=("persistent",), level="crash-safe")
def reopen_finds_what_was_stored(h: Harness) -> None:
    """Pages survive close and open, in this process and in the next one.

    Mooncake#2246: metadata was lost on restart, and old data overwritten as free.
    """
    client, names = h.open(), h.names(12)
    h.store(client, names)
    client.close()
    reopened = h.open()
    expect_presence(reopened.batch_exists(reopened.keys(names)), [True] * 12, "after reopening")
    h.check(reopened, names)
    reopened.close()
    got = h.process().call("get", names=names, buffers=list(MHA))
    expect(got, ["ok"] * 12, "the pages in the next process")


@case("lifecycle")
def close_twice(h: Harness) -> None:
    """Closing twice, or closing what was never used, is fine."""
    unused, used = h.open(), h.open()
    unused.close()
    unused.close()
    h.store(used, h.names(2))
    used.close()
    used.close()
    stack = h.stack()
    stack.close()
    stack.close()


def _resources() -> tuple[int, int]:
    gc.collect()
    return threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


@case("lifecycle", seconds=120)
def hundred_attaches_leave_nothing(h: Harness) -> None:
    """After 100 times open, use, close there are no more threads, descriptors or memory than before.

    sglang#21078: file descriptors leaked; sglang#25173: registrations did. SGLang attaches and detaches
    a backend at run time.
    """
    names = h.names(2)

    def cycle() -> None:
        storage = h.target.open(h.tmp, h.namespace)
        memory = GuardedPages(2, MHA)
        storage.register_buffer(memory.region)
        storage.batch_set_from(h.namespace.keys(names), memory.pages)
        storage.batch_get_into(h.namespace.keys(names), memory.pages)
        storage.unregister_buffer(memory.region)
        storage.close()

    for _ in range(3):  # what is set up once and kept is no leak
        cycle()
    tracing = tracemalloc.is_tracing()
    threads, descriptors = _resources()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(CYCLES):
        cycle()
    left_threads, left_descriptors = _resources()
    after, _ = tracemalloc.get_traced_memory()
    if not tracing:
        tracemalloc.stop()
    h.history.note(f"threads {threads} -> {left_threads}, descriptors {descriptors} -> {left_descriptors}")
    h.history.note(f"Python memory {before} -> {after} B")
    # a few may come and go on their own; a leak leaves one a cycle
    require(left_threads - threads < CYCLES // 10, f"{left_threads - threads} threads are left")
    require(
        left_descriptors - descriptors < CYCLES // 10,
        f"{left_descriptors - descriptors} descriptors are left",
    )
    require(after - before < CYCLES * 4096, f"{after - before} bytes of memory are left")


@case("lifecycle", needs=("clear",))
def clear_removes_all_of_this_namespace(h: Harness) -> None:
    """After clear every page of the namespace is a miss, and can be stored again.

    sglang#40409: Mooncake's clear left leased objects; 16,010 tokens were restored after it.
    """
    client, names = h.open(), h.names(20)
    h.store(client, names)
    h.check(client, names)
    client.clear()
    expect_presence(client.batch_exists(client.keys(names)), [False] * 20, "after clear")
    h.check(client, names, [Status.MISSING] * 20)
    h.store(client, names[:3])
    h.check(client, names[:3])
    client.clear()
    client.clear()


@case("lifecycle", needs=("clear", "shared"))
def clear_is_seen_by_a_second_client(h: Harness) -> None:
    """What one client clears is gone for the other too, even if that one has just read it.

    sglang#40409: the postcondition of clear was never looked at from a second client.
    """
    first, second = h.open(), h.open()
    names = h.names(6)
    h.store(first, names)
    h.check(second, names)
    first.clear()
    expect_presence(second.batch_exists(second.keys(names)), [False] * 6, "the second client after clear")
    h.check(second, names, [Status.MISSING] * 6)


@case("lifecycle", needs=("clear",))
def clear_leaves_other_namespaces_alone(h: Harness) -> None:
    """``clear`` removes pages of its own namespace and nothing else.

    sglang#32693 and survey A7: clear() walks the mount and deletes other models' and tenants' data.
    """
    client = h.open()
    mine, names = h.names(3), h.names(4)
    h.store(client, mine)
    others = [replace(h.namespace, tenant=f"{h.namespace.tenant}{i}") for i in range(3)]
    for other in others:  # through the same client: their keys carry their own digest
        memory = h.filled(client, names)
        statuses = client.batch_set_from(other.keys(names), memory.pages)
        expect_statuses(statuses, [Status.OK] * 4, "batch_set_from under another namespace")
    client.clear()
    for other in others:
        expect_presence(client.batch_exists(other.keys(names)), [True] * 4, "another namespace after clear")
        if h.capabilities.shared:
            h.check(h.open(other), names)
    expect_presence(client.batch_exists(client.keys(mine)), [False] * 3, "this namespace after clear")


@case("lifecycle")
def what_is_not_there_says_so(h: Harness) -> None:
    """``delete`` and ``clear`` either work or raise UnsupportedError, as the capabilities say.

    ``clear`` of the built-ins returns None or bool, and some return without doing anything (survey
    fact 5).
    """
    client, names = h.open(), h.names(2)
    h.store(client, names)
    if not h.capabilities.delete:
        expect_error(UnsupportedError, lambda: client.delete(client.keys(names)))
    if not h.capabilities.clear:
        expect_error(UnsupportedError, client.clear)
    if h.capabilities.delete and h.capabilities.clear:
        client.delete(client.keys(names[:1]))
        client.clear()
        expect_presence(client.batch_exists(client.keys(names)), [False] * 2, "after delete and clear")


@case("lifecycle")
def use_after_close(h: Harness) -> None:
    """A call on a closed client ends at once, with an answer or a StorageError; through the SDK with
    ClosedError.

    A thread of the engine may still be at it when another one detaches (sglang#20101).
    """
    client, names = h.open(), h.names(2)
    memory = h.store(client, names)
    client.close()
    keys = client.keys(names)
    for call in (
        lambda: client.batch_exists(keys),
        lambda: client.batch_get_into(keys, memory.pages),
        lambda: client.batch_set_from(keys, memory.pages),
        lambda: client.get(keys[0]),
        lambda: client.exists(keys[0]),
    ):
        start = time.monotonic()
        try:
            call()
        except StorageError as error:
            h.history.note(f"refused: {error}")
        require(time.monotonic() - start < 5.0, "a call on a closed client took more than 5 s")
    stack = h.stack()
    pages = h.store(stack, names).pages
    stack.close()
    expect_error(ClosedError, lambda: stack.batch_exists(names))
    expect_error(ClosedError, lambda: stack.batch_get_into(names, pages))
    expect_error(ClosedError, lambda: stack.batch_set_from(names, pages))


@case("lifecycle", seconds=60)
def close_during_a_batch(h: Harness) -> None:
    """Closing while batches run ends them: each returns statuses or a StorageError, right bytes for OK.

    sglang#13395: survivors crashed when a peer went away under a transfer.
    """
    for _ in range(5):
        client, names = h.open(), h.names(16)
        h.store(client, names, (256 << 10,))
        reader = _Reader(h, client, names)
        reader.busy.wait(10.0)
        client.close()
        reader.stop.set()
        reader.thread.join(10.0)
        require(not reader.thread.is_alive(), "a batch was still running 10 s after close")
        if reader.failed:
            raise reader.failed[0]


class _Reader:
    """A thread that reads pages until it is stopped or refused."""

    def __init__(self, h: Harness, client: Client, names: list[str]) -> None:
        self.busy, self.stop = threading.Event(), threading.Event()
        self.failed: list[Exception] = []
        self._h, self._client, self._names = h, client, names
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            while not self.stop.is_set():
                self._h.check(self._client, self._names, [set(Status)] * len(self._names), (256 << 10,))
                self.busy.set()
        except StorageError:
            pass  # that is how a batch may end
        except Exception as error:
            self.failed.append(error)
        finally:
            self.busy.set()


@case("lifecycle", seconds=60)
def fork_is_safe(h: Harness) -> None:
    """A process that forks with the store open goes on; its child can open the store for itself.

    Engines fork for tokenizers, data loaders and subprocesses: locks held by threads that do not
    exist in the child must not hang it. A client library that cannot be used there at all is refused
    at once, by UnsupportedError.
    """
    names = h.names(6)
    said = h.process().call("fork", names=names, buffers=list(MHA), seconds=5.0)
    expect(said["before"], ["ok"] * 3, "pages stored before the fork")
    expect(said["after"], ["ok"] * 3, "pages that the parent stored after the fork")
    expect(said["read"], ["ok"] * 3, "pages that the parent read after the fork")
    if isinstance(said["child"], dict):
        raise h.unsupported(f"in a forked child: {said['child']['unsupported']}")
    expect(said["child"], [["ok"] * 3, ["ok"] * 3], "what the child stored and read")
