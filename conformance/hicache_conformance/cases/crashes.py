"""Crashes: a process is killed while it writes; what was acknowledged is there, and whole."""

from __future__ import annotations

import time

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.outcomes import expect, require
from hicache_storage import Status

ROUNDS = 4
SHAPE = (192 << 10, 192 << 10)
BATCH = 4


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
