"""Crashes: a process is killed while it writes; what was acknowledged is there, and whole."""

from __future__ import annotations

import time

from hicache_conformance.case import case
from hicache_conformance.harness import MHA, Harness
from hicache_conformance.outcomes import expect, expect_presence, require
from hicache_storage import Status

ROUNDS = 4
SHAPE = (192 << 10, 192 << 10)
BATCH = 4
PATIENCE = 20.0
"""Seconds in which a store has to notice that a process is gone."""


def _killed_writer(h: Harness, prefix: str) -> list[str]:
    """Start a writer, kill it at a random moment; the names of the pages that it was told are stored."""
    other = h.process()
    other.start("stream", prefix=prefix, buffers=list(SHAPE), batch=BATCH)
    acknowledged = [other.answer()]
    time.sleep(h.rng.uniform(0.0, 0.06))  # the random point at which it dies
    acknowledged += other.kill()
    return acknowledged


@case("lifecycle", needs=("persistent",), level="crash-safe", seconds=90)
def killed_writer_leaves_no_torn_page(h: Harness) -> None:
    """After a writer was killed (SIGKILL) mid-write, each of its pages is whole or missing, never torn.

    sglang#29969: without a temporary name the reader sees part of a page; survey A7: nothing but the
    size is ever checked, so a preallocated file of full size is a hit.
    """
    for round_number in range(ROUNDS):
        acknowledged = _killed_writer(h, f"torn{round_number}")
        count = len(acknowledged) + 2 * BATCH
        names = [f"torn{round_number}-{i}" for i in range(count)]
        client = h.open()
        seen = client.batch_exists(client.keys(names))
        statuses = h.check(client, names, [{Status.OK, Status.MISSING}] * count, SHAPE)
        expect([bool(status) for status in statuses], seen, "exists, compared with what could be read")
        h.store(client, names[-2 * BATCH :], SHAPE)
        h.check(client, names[-2 * BATCH :], buffers=SHAPE)


@case("lifecycle", needs=("persistent",), level="crash-safe", seconds=90)
def killed_writer_keeps_its_word(h: Harness) -> None:
    """A page that was acknowledged before the process was killed is there afterwards.

    Mooncake#2246, Mooncake#1336: metadata lost with the process; pages that only it knew were gone.
    """
    for round_number in range(2):
        acknowledged = _killed_writer(h, f"word{round_number}")
        require(acknowledged, "the writer stored nothing before it was killed")
        h.check(h.open(), acknowledged, buffers=SHAPE)


@case("lifecycle", needs=("persistent", "shared"), level="crash-safe", seconds=90)
def killed_peer_does_not_stop_the_others(h: Harness) -> None:
    """A process killed while it writes leaves no lock behind: others go on at once, on the same pages.

    sglang#13395: survivors crashed after a peer had gone; a lock file without an owner wedges a mount.
    """
    client = h.open()
    mine = h.names(4)
    for round_number in range(2):
        _killed_writer(h, f"peer{round_number}")
        start = time.monotonic()
        names = [f"peer{round_number}-{i}" for i in range(2 * BATCH)]
        h.store(client, [*mine, *names], SHAPE)
        h.check(client, [*mine, *names], buffers=SHAPE)
        require(time.monotonic() - start < 10.0, "the survivor was held up for more than 10 s")


@case("lifecycle", needs=("shared",), level="fault-tolerant", seconds=60)
def pages_of_a_killed_process_are_not_promised(h: Harness) -> None:
    """Pages that a killed process has stored are whole or misses; what was found to be a miss is promised
    no more, and can be stored anew.

    sglang#31315: metadata said present after the only segment had died. A put on such a key may do
    nothing, and say OK.
    """
    names, other = h.names(6), h.process()
    expect(other.call("set", names=names, buffers=list(MHA)), ["ok"] * 6, "what the other process stored")
    client = h.open()
    keys = client.keys(names)
    expect_presence(client.batch_exists(keys), [True] * 6, "pages of another process")
    other.kill()
    statuses = h.check(client, names, [set(Status)] * 6)
    found = client.batch_exists(keys)
    broken = sum(there and not status for there, status in zip(found, statuses, strict=True))
    require(not broken, f"{broken} pages that could not be read a moment ago are said to exist")
    memory = h.filled(client, names)
    ends_at = time.monotonic() + PATIENCE
    while not all(client.batch_set_from(keys, memory.pages)):
        require(time.monotonic() < ends_at, f"they could not be stored anew in {PATIENCE} s")
        time.sleep(0.05)
    h.check(client, names)
