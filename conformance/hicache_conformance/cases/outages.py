"""Outages: a store that is down, hangs or is slow costs its caller misses, and no time to speak of.

The faults are put between the backend and the SDK's layers, so that the backend under test takes
part in what comes back when the fault is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hicache_conformance.case import case
from hicache_conformance.cases.late_writes import GRACE_SECONDS, Watched, watch
from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.interposers import Outage
from hicache_conformance.outcomes import expect, expect_presence, expect_statuses, require
from hicache_storage import Status, StorageError

SECONDS = 0.2
"""Deadline of every call in these cases."""
PATIENCE = 5.0
"""How long to wait for something that should happen in much less."""

MISS = {Status.MISSING, Status.FAILED, Status.TIMED_OUT, Status.CORRUPT}


def _with_outage(h: Harness, **sdk: Any) -> tuple[Client, Outage]:
    """A stack with short deadlines and a quick breaker, and the switch below it."""
    made: list[Outage] = []

    def wrap(storage: Any) -> Outage:
        made.append(Outage(storage))
        return made[0]

    limits = {"exists_seconds": SECONDS, "get_seconds": SECONDS, "set_seconds": SECONDS}
    stack = h.stack(wrap, **{**limits, "breaker_cooldown": 0.02, "negative_ttl": 0.0, **sdk})
    h.defer(made[0].up)
    return stack, made[0]


def _timed(call: Callable[[], Any], seconds: float, what: str) -> Any:
    start = time.monotonic()
    result = call()
    took = time.monotonic() - start
    require(took < seconds, f"{what} took {took:.2f} s; {seconds:.2f} s is the limit")
    return result


def _until(holds: Callable[[], bool], what: str) -> None:
    ends_at = time.monotonic() + PATIENCE
    while not holds():
        require(time.monotonic() < ends_at, f"{what} did not happen in {PATIENCE} s")
        time.sleep(0.01)


def _all_miss(h: Harness, stack: Client, names: list[str]) -> None:
    """Every call is answered with misses, within its deadline, and nothing is raised."""
    limit = SECONDS + GRACE_SECONDS
    keys, memory = stack.keys(names), h.filled(stack, names)
    found = _timed(lambda: stack.batch_exists(keys), limit, "batch_exists")
    expect_presence(found, [False] * len(names), "batch_exists while the store fails")
    got = _timed(lambda: stack.batch_get_into(keys, memory.pages), limit, "batch_get_into")
    expect_statuses(got, [MISS] * len(names), "batch_get_into while the store fails")
    put = _timed(lambda: stack.batch_set_from(keys, memory.pages), limit, "batch_set_from")
    expect_statuses(put, [MISS] * len(names), "batch_set_from while the store fails")
    expect(_timed(lambda: stack.get(keys[0]), limit, "get"), None, "get while the store fails")
    require(memory.guards_intact(), "something was written outside the pages")


def _stored_patiently(h: Harness, stack: Client, names: list[str]) -> None:
    """Store pages, trying again when a busy machine makes a call late."""
    memory = h.filled(stack, names)
    keys = stack.keys(names)
    _until(lambda: all(stack.batch_set_from(keys, memory.pages)), "storing pages in a store that is up")


def _comes_back(h: Harness, stack: Client, names: list[str]) -> None:
    """The pages that were stored before are served again, soon."""
    _until(lambda: all(stack.batch_exists(stack.keys(names))), "the pages being there again")
    _until(
        lambda: all(h.check(stack, names, [MISS | {Status.OK}] * len(names))), "the pages being served again"
    )


@case("faults")
def down_backend_is_a_miss(h: Harness) -> None:
    """A store that raises at every call is a cache that misses: nothing is raised to the caller.

    sglang#38428: any backend exception killed the backup thread and leaked host memory.
    """
    stack, outage = _with_outage(h)
    names = h.names(8)
    _stored_patiently(h, stack, names)
    outage.down()
    for _ in range(5):
        _all_miss(h, stack, names)
    outage.up()
    _comes_back(h, stack, names)


@case("faults")
def foreign_exceptions_are_misses(h: Harness) -> None:
    """So is a store that raises what no contract mentions: OSError, RuntimeError, MemoryError, KeyError.

    sglang#38428; sglang#39269: an OSError from a short read ended the prefetch worker before its ack.
    """
    stack, outage = _with_outage(h)
    names = h.names(4)
    _stored_patiently(h, stack, names)
    for error in (OSError(5, "I/O error"), RuntimeError("lost"), MemoryError(), KeyError("x"), TypeError()):
        outage.down(error)
        _all_miss(h, stack, names)
        outage.up()
        _comes_back(h, stack, names)


@case("faults", seconds=60)
def hung_backend_returns_in_time(h: Harness) -> None:
    """A store that does not answer costs one deadline a call at most; its late answers touch nothing.

    dynamo#5012: disk onboarding hangs for good. Rule 3: nothing waits forever, nothing writes late.
    """
    stack, outage = _with_outage(h, breaker=False)
    names = h.names(8)
    _stored_patiently(h, stack, names)
    watched = Watched(h.memory(stack, 8))
    pages = watched.memory.pages
    outage.hung()
    limit = SECONDS + GRACE_SECONDS
    got = _timed(lambda: stack.batch_get_into(stack.keys(names), pages), limit, "batch_get_into")
    expect_statuses(got, [{Status.TIMED_OUT, Status.FAILED}] * 8, "batch_get_into of a hung store")
    for _ in range(2):
        try:
            _timed(lambda: stack.batch_exists(stack.keys(names)), limit, "batch_exists")
        except StorageError as error:  # without the breaker, errors pass
            h.history.note(f"raised in time: {error}")
    outage.up()
    watch(watched.taken_back())


@case("faults", seconds=60)
def hung_backend_opens_the_breaker(h: Harness) -> None:
    """After the first call that timed out, no call waits: misses cost microseconds while the store hangs.

    sglang#31315: each request repeated exists, get and timeout. sglang#31402: a pure miss slowed TTFT.
    """
    stack, outage = _with_outage(h)
    names = h.names(128)
    _stored_patiently(h, stack, names[:4])
    outage.hung()
    _all_miss(h, stack, names[:4])
    seen = outage.calls
    start = time.monotonic()
    for number in range(200):
        stack.batch_exists(names)
        took = time.monotonic() - start
        require(
            took < 1.0 + SECONDS, f"{number + 1} lookups of 128 keys took {took:.2f} s while the store hangs"
        )
    require(outage.calls - seen <= 10, f"{outage.calls - seen} of 200 lookups reached a store that hangs")
    outage.up()
    _comes_back(h, stack, names[:4])


@case("faults")
def breaker_opens_on_errors(h: Harness) -> None:
    """After a few calls in a row that fail, the store is left alone but for probes.

    Mooncake#2704: unhealthy segments were asked again and again.
    """
    stack, outage = _with_outage(h, breaker_failures=3, breaker_cooldown=0.5)
    names = h.names(4)
    outage.down()
    for _ in range(3):
        stack.batch_exists(stack.keys(names))
    seen = outage.calls
    for _ in range(100):
        expect_presence(stack.batch_exists(stack.keys(names)), [False] * 4, "batch_exists of a dead store")
    require(outage.calls - seen <= 5, f"{outage.calls - seen} of 100 calls reached a store that is down")


@case("faults", seconds=60)
def breaker_recovers(h: Harness) -> None:
    """When the store answers again, pages stored before are served again soon, outage after outage.

    sglang#20101: forced detach never landed; a store that came back stayed unused until a restart.
    """
    stack, outage = _with_outage(h)
    names = h.names(6)
    _stored_patiently(h, stack, names)
    for _ in range(3):
        outage.down()
        for _ in range(4):
            stack.batch_exists(stack.keys(names))
        outage.up()
        _comes_back(h, stack, names)
        _stored_patiently(h, stack, h.names(2))


@case("faults")
def slow_backend_still_serves(h: Harness) -> None:
    """A store that is slow, but within its deadline, serves every page."""
    stack, outage = _with_outage(h, exists_seconds=5, get_seconds=5, set_seconds=5)
    outage.delay = 0.05
    names = h.names(6)
    h.store(stack, names)
    expect_presence(stack.batch_exists(stack.keys(names)), [True] * 6, "batch_exists of a slow store")
    h.check(stack, names)


@case("faults")
def closing_while_it_hangs(h: Harness) -> None:
    """A stack over a hung store closes in bounded time.

    sglang#17521, sglang#20101: detach needs an idle server; here it needs nothing.
    """
    stack, outage = _with_outage(h)
    outage.hung()
    stack.batch_exists(h.names(2))
    _timed(stack.close, 15.0, "close")
