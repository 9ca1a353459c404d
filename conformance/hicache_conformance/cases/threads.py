"""Several callers at once: threads of one client, clients of one store, processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import expect, expect_presence, expect_statuses, require
from hicache_storage import Status

LARGE = (512 << 10, 512 << 10)


def together(jobs: Sequence[Callable[[], None]]) -> None:
    """Run the jobs at the same time, each in a thread; raise what the first of them raised."""
    start = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        start.wait()
        job()

    with ThreadPoolExecutor(len(jobs)) as pool:
        for future in [pool.submit(run, job) for job in jobs]:
            future.result()


@case("contract", seconds=60)
def many_threads(h: Harness) -> None:
    """Eight threads set, look up and read pages of their own at once; none sees another's bytes.

    SGLang calls a backend from a query, a prefetch and a backup thread of each rank at once.
    """
    client = h.open()

    def job(names: Sequence[str]) -> Callable[[], None]:
        def run() -> None:
            for start in range(0, len(names), 16):
                part = names[start : start + 16]
                h.store(client, part)
                expect_presence(client.batch_exists(client.keys(part)), [True] * len(part), "batch_exists")
                h.check(client, part)

        return run

    together([job(h.names(64)) for _ in range(8)])


@case("contract")
def same_key_writers(h: Harness) -> None:
    """Writers of one key race: each is told OK, and what is read during and after the race is whole.

    Ranks of one server store the same MLA page at the same moment (sglang#8865); a shared temporary
    name makes them tear each other's page.
    """
    client = h.open()
    names = h.names(4)

    def write() -> None:
        for _ in range(6):
            h.store(client, names, LARGE[:1])

    def read() -> None:
        for _ in range(12):
            h.check(client, names, [{Status.OK, Status.MISSING}] * 4, LARGE[:1])

    together([write, write, write, read])
    h.check(client, names, buffers=LARGE[:1])


def _watch_a_write(h: Harness, writer: Client, reader: Client) -> None:
    """Store pages while another thread polls for them: the first sight of a page is the whole page."""
    names = h.names(12)
    values = {name: page_content(name, sum(LARGE)) for name in names}
    memory = h.memory(reader, 1, LARGE)
    written = threading.Event()

    def write() -> None:
        try:
            for name in names:
                h.store(writer, [name], LARGE)
        finally:
            written.set()

    def read() -> None:
        for name in names:
            key = reader.keys([name])
            while not written.is_set():
                if reader.batch_exists(key)[0]:
                    break
            memory.blank()
            statuses = reader.batch_get_into(key, memory.pages)
            expect_statuses(statuses, [Status.OK], "batch_get_into of a page that exists")
            expect(memory.content(0), values[name], "a page that is just being written")
            value = reader.get(key[0])
            expect(bytes(value or b""), values[name], "get of a page that is just being written")

    together([write, read])


@case("contract")
def read_during_write(h: Harness) -> None:
    """A page is seen whole or not at all while it is being written; once exists says yes, it is there.

    sglang#29969: NIXL writes straight to the final path; readers and exists see partial files.
    """
    client = h.open()
    _watch_a_write(h, client, client)


@case("contract", needs=("shared",))
def read_during_write_by_another_client(h: Harness) -> None:
    """The same between two clients of one store: no partial page is ever visible (sglang#29969)."""
    _watch_a_write(h, h.open(), h.open())


@case("contract", needs=("shared",))
def two_clients_one_store(h: Harness) -> None:
    """What one client stores, the other finds, also when it had asked before; deletes are seen too.

    LMCache#3520: exists never hit what another had stored. A cache of misses, or of hits, that never
    expires makes two servers blind to each other (sglang#31315).
    """
    writer, reader = h.open(), h.open()
    names = h.names(8)
    keys = reader.keys(names)
    expect_presence(reader.batch_exists(keys), [False] * 8, "the second client, before")
    h.store(writer, names)
    expect_presence(reader.batch_exists(keys), [True] * 8, "the second client, after the first stored")
    h.check(reader, names)
    if h.capabilities.delete:
        writer.delete(keys[:4])
        expect_presence(reader.batch_exists(keys), [False] * 4 + [True] * 4, "after the first deleted")
        h.check(reader, names, [Status.MISSING] * 4 + [Status.OK] * 4)


@case("contract", needs=("shared",))
def two_processes_one_store(h: Harness) -> None:
    """What a process stores, another process finds, both ways."""
    client, other = h.open(), h.process()
    ours, theirs = h.names(4), h.names(4)
    h.store(client, ours)
    expect(other.call("get", names=ours, buffers=[4096, 4096]), ["ok"] * 4, "the other process reads ours")
    expect(other.call("set", names=theirs, buffers=[4096, 4096]), ["ok"] * 4, "the other process stores")
    require(all(client.batch_exists(client.keys(theirs))), "exists does not see the other process's pages")
    h.check(client, theirs)
