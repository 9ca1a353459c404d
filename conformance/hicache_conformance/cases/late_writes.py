"""No late write: once a call has returned, however it ended, nobody touches the caller's memory.

The caller gives the memory to another request at once; a transfer that was given up but went on
writes one user's KV into another's page. No check of content can see that, since the page was
right when it was checked.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.outcomes import expect, expect_statuses, require
from hicache_conformance.pages import GuardedPages
from hicache_storage import Status, StorageError
from hicache_storage.deadline import deadline

WATCH_SECONDS = 0.25
GRACE_SECONDS = 2.0
"""What a call may take beyond its deadline on a machine that is busy."""

SHAPE = (128 << 10, 128 << 10)


class Watched:
    """Page memory that its owner takes back at once when the call has returned.

    ``settled`` is what the memory looks like from then on, unless somebody writes late.
    """

    def __init__(self, memory: GuardedPages) -> None:
        self.memory = memory
        memory.blank()
        self.settled = memory.fingerprint()

    def taken_back(self) -> Watched:
        """The call has returned: give the memory its own look again."""
        self.memory.blank()
        return self


def watch(*watched: Watched) -> None:
    """See whether the memory stays as its owner left it."""
    ends_at = time.monotonic() + WATCH_SECONDS
    while time.monotonic() < ends_at:
        time.sleep(0.01)
        for one in watched:
            what = "the memory of pages changed after the call had returned; fingerprint"
            expect(one.memory.fingerprint(), one.settled, what)


def _read(h: Harness, client: Client, names: Sequence[str], seconds: float | None) -> Watched:
    watched = Watched(h.memory(client, len(names), SHAPE))
    start = time.monotonic()
    try:
        with deadline(seconds):
            statuses = client.batch_get_into(client.keys(names), watched.memory.pages)
        watched.taken_back()
        expect_statuses(statuses, [set(Status)] * len(names), "batch_get_into")
    except StorageError as error:
        watched.taken_back()
        h.history.note(f"the batch was refused: {error}")
    took = time.monotonic() - start
    if seconds is not None:
        require(took < seconds + GRACE_SECONDS, f"a call with {seconds} s left took {took:.2f} s")
    return watched


@case("zero-copy")
def late_write_after_a_hit(h: Harness) -> None:
    """After a batch of hits has returned, its pages do not change any more.

    Mooncake#850, Mooncake#778: a slow Get outlives its lease and the memory is recycled.
    """
    client = h.open()
    names = h.names(16)
    h.store(client, names, SHAPE)
    watch(_read(h, client, names, None))


@case("zero-copy")
def late_write_after_a_miss(h: Harness) -> None:
    """A batch that misses, or partly misses, leaves nothing behind that writes later."""
    client = h.open()
    names = h.names(16)
    h.store(client, names[::2], SHAPE)
    watch(_read(h, client, h.names(8), None), _read(h, client, names, None))


@case("zero-copy")
def late_write_after_an_error(h: Harness) -> None:
    """A batch with objects that do not fit, or that is refused, leaves nothing behind that writes later."""
    client = h.open()
    names = h.names(12)
    h.store(client, names[:6], SHAPE)
    h.store(client, names[6:], (SHAPE[0],))
    watched = _read(h, client, names, None)
    strange = Watched(GuardedPages(12, SHAPE))
    try:
        client.batch_get_into(client.keys(names), strange.memory.pages)
    except StorageError as error:
        h.history.note(f"unregistered memory was refused: {error}")
    watch(watched, strange.taken_back())


@case("zero-copy", needs=("bounded",), seconds=60)
def late_write_after_a_deadline(h: Harness) -> None:
    """A bounded backend returns by its deadline, from none left to some, and nothing writes after that.

    The capability ``bounded`` makes the SDK hand the caller's own memory down; a read that goes on
    in the background would land in another request's page (Mooncake#850).
    """
    client = h.open()
    names = h.names(64)
    h.store(client, names, SHAPE)
    watch(*[_read(h, client, names, seconds) for seconds in (0.0, 0.0005, 0.002, 0.01)])
    h.check(client, names, buffers=SHAPE)


@case("zero-copy", needs=("bounded",), seconds=60)
def late_read_after_a_deadline(h: Harness) -> None:
    """A write that its deadline cut off stores the page as it was, or not at all.

    The memory is another page's by then; a write that goes on stores the wrong bytes under the key.
    """
    client = h.open()
    for seconds in (0.0, 0.0005, 0.002, 0.01):
        names = h.names(32)
        memory = h.filled(client, names, SHAPE)
        start = time.monotonic()
        try:
            with deadline(seconds):
                client.batch_set_from(client.keys(names), memory.pages)
        except StorageError as error:
            h.history.note(f"the batch was refused: {error}")
        took = time.monotonic() - start
        memory.blank()
        require(took < seconds + GRACE_SECONDS, f"a call with {seconds} s left took {took:.2f} s")
        time.sleep(0.02)
        h.check(client, names, [{Status.OK, Status.MISSING}] * 32, SHAPE)


@case("zero-copy")
def late_write_through_the_layers(h: Harness) -> None:
    """The same through the SDK, with a deadline far too short: late pages are TIMED_OUT and stay alone."""
    stack = h.stack(get_seconds=0.002, set_seconds=20, breaker=False)
    names = h.names(64)
    h.store(stack, names, SHAPE)
    watch(*[_read(h, stack, names, None) for _ in range(3)])
