"""Capacity: a store with little room stays within it, keeps what is used, and is right all the while."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hicache_conformance.case import case
from hicache_conformance.harness import SMALL, Harness
from hicache_conformance.history import Client
from hicache_conformance.outcomes import expect_statuses, require
from hicache_storage import SettingsError, Status

PAGE = (32 << 10, 32 << 10)
PAGES = 64
"""Pages that fit."""
CAPACITY = PAGES * sum(PAGE)
SLACK = 1.1
"""A store may count in blocks, or run over for a moment between two watermarks."""
PATIENCE = 6.0
NOTED_SECONDS = 1.1
"""After this long a store must have noted that a page was read."""

NEEDS = ("evicts", SMALL)


def _small(h: Harness) -> Client:
    """A client of a store with room for ``PAGES`` pages."""
    try:
        return h.open(capacity=CAPACITY)
    except SettingsError as error:
        raise h.unsupported(f"the backend cannot be given so little room: {error}") from error


def _flood(h: Harness, client: Client, count: int) -> list[str]:
    """Store ``count`` fresh pages in batches of 8; what cannot be stored must say FAILED."""
    names = h.names(count)
    for start in range(0, count, 8):
        part = names[start : start + 8]
        statuses = client.batch_set_from(client.keys(part), h.filled(client, part, PAGE).pages)
        expect_statuses(statuses, [{Status.OK, Status.FAILED}] * len(part), "batch_set_from")
    return names


def _settled(client: Client, names: Sequence[str], limit: int) -> list[bool]:
    """Which pages exist once at most ``limit`` do; eviction may run in the background."""
    ends_at = time.monotonic() + PATIENCE
    while True:
        found = client.batch_exists(client.keys(names))
        if sum(found) <= limit:
            return found
        require(time.monotonic() < ends_at, f"{sum(found)} pages are kept where {limit} may be")
        time.sleep(0.02)


@case("capacity", needs=NEEDS, seconds=60)
def stays_within_capacity(h: Harness) -> None:
    """Four times as many pages as fit leave at most what fits, and not next to nothing either.

    vllm#52784, sglang#26670: the tier grew until the disk or the tmpfs was full. LMCache#4664: pods
    were evicted.
    """
    client = _small(h)
    found = _settled(client, _flood(h, client, 4 * PAGES), int(PAGES * SLACK))
    require(sum(found) >= PAGES // 4, f"{sum(found)} pages are left where {PAGES} fit")


@case("capacity", needs=NEEDS, seconds=60)
def newest_pages_stay(h: Harness) -> None:
    """What was stored last is still there: eviction takes the oldest.

    A store that evicts the newest pages, or refuses them, serves the past for ever.
    """
    client = _small(h)
    names = _flood(h, client, 3 * PAGES)
    _settled(client, names, int(PAGES * SLACK))
    h.check(client, names[-PAGES // 4 :], buffers=PAGE)


@case("capacity", needs=NEEDS, seconds=60)
def used_pages_stay(h: Harness) -> None:
    """Pages that are read again and again outlive pages that nobody reads (system prompts).

    First-in-first-out throws the most shared prefix away first. A store may note a use once a second.
    """
    client = _small(h)
    used = h.names(4)
    h.store(client, used, PAGE)
    names = list(used)
    for _ in range(2):
        time.sleep(NOTED_SECONDS)
        h.check(client, used, buffers=PAGE)
        names += _flood(h, client, 3 * PAGES // 4)
    _settled(client, names, int(PAGES * SLACK))
    h.check(client, used, buffers=PAGE)


@case("capacity", needs=NEEDS, seconds=60)
def pages_being_read_stay_whole(h: Harness) -> None:
    """A page that is evicted while it is read is served whole or missed, never torn.

    Mooncake#850: memory was recycled under a reader whose lease had run out.
    """
    client = _small(h)
    names = _flood(h, client, PAGES)
    stop = threading.Event()
    failed: list[BaseException] = []

    def read() -> None:
        try:
            while not stop.is_set():
                h.check(client, names[-16:], [{Status.OK, Status.MISSING}] * 16, PAGE)
        except BaseException as error:
            failed.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    _flood(h, client, 2 * PAGES)
    stop.set()
    reader.join(20.0)
    require(not reader.is_alive(), "a reader hangs while pages are evicted")
    if failed:
        raise failed[0]


@case("capacity", needs=(SMALL,), seconds=60)
def an_object_larger_than_the_store(h: Harness) -> None:
    """An object that can never fit is refused with a status, or evicted; the store goes on.

    A full store is a state to survive (LMCache#4664), not an exception.
    """
    client = _small(h)
    huge = (2 * CAPACITY,)
    names = h.names(1)
    statuses = client.batch_set_from(client.keys(names), h.filled(client, names, huge).pages)
    expect_statuses(statuses, [{Status.OK, Status.FAILED}], "batch_set_from of an object over the capacity")
    _settled(client, names, 0)
    after = h.names(4)
    h.store(client, after, PAGE)
    h.check(client, after, buffers=PAGE)


@case("capacity", needs=("evicts", "shared", SMALL), seconds=60)
def two_clients_share_the_bound(h: Harness) -> None:
    """Two clients of one store keep within one capacity together, not within one each.

    Rank processes of one server share a directory (survey A3); each counting only its own pages fills
    the disk eight times over.
    """
    first, second = _small(h), _small(h)
    names = []
    for _ in range(4):
        names += _flood(h, first, PAGES // 2)
        names += _flood(h, second, PAGES // 2)
    _settled(first, names, int(PAGES * SLACK))


@case("capacity", needs=NEEDS, seconds=60)
def one_entry_that_cannot_be_removed(h: Harness) -> None:
    """An entry that cannot be removed stops neither eviction nor writing.

    sglang#31485: one un-removable file at the LRU front wedged all new writes.
    """
    client = _small(h)
    backdoor = h.corruptor(client)
    pin, unpin = getattr(backdoor, "pin", None), getattr(backdoor, "unpin", None)
    if pin is None or unpin is None:
        raise h.unsupported("the backend's corruptor cannot make an entry un-removable (pin, unpin)")
    stuck = h.names(1)
    h.store(client, stuck, PAGE)
    key = client.keys(stuck)[0]
    pin(key)
    h.defer(lambda: unpin(key))
    names = _flood(h, client, 3 * PAGES)
    _settled(client, names, int(PAGES * SLACK))
    h.store(client, names[-4:], PAGE)
    h.check(client, names[-4:], buffers=PAGE)
