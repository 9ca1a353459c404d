"""Faults: whatever the store does, the caller gets an answer in time, and never a wrong byte.

The faults are put between the backend and the SDK's layers, so that the backend under test takes
part in what comes back when the fault is over.
"""

from __future__ import annotations

from typing import Any

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.interposers import Babbler, FullStore, Liar, faulty
from hicache_conformance.outcomes import expect_presence, expect_statuses, require
from hicache_storage import Status

MISS = {Status.MISSING, Status.FAILED, Status.TIMED_OUT, Status.CORRUPT}


@case("faults")
def full_store_refuses_writes_only(h: Harness) -> None:
    """A store that is full fails each write and goes on serving reads, however many writes fail.

    LMCache#4386: one rejected write disabled the disk tier for ever. LMCache#4664: a full disk took the
    node down.
    """
    names = h.names(6)
    writer = h.stack()
    h.store(writer, names)
    full: list[FullStore] = []

    def wrap(storage: Any) -> Any:
        full.append(FullStore(storage if h.capabilities.shared else writer.backend))
        return full[0]

    stack = h.stack(wrap)
    memory = h.filled(stack, h.names(4))
    for _ in range(2):
        for _ in range(5):
            statuses = stack.batch_set_from(stack.keys(h.names(4)), memory.pages)
            expect_statuses(statuses, [{Status.FAILED}] * 4, "batch_set_from of a full store")
        h.check(stack, names)


@case("faults", seconds=60)
def flaky_backend_never_lies(h: Harness) -> None:
    """With calls, pages and bits failing at random, each page is right or a miss, and the next one works.

    #32503: an injector that reports failures as clean misses proves nothing; here bits flip.
    """
    stack = h.stack(
        faulty(seed=h.seed, error_rate=0.1, page_error_rate=0.2, flip_rate=0.2),
        breaker_failures=1000,
        negative_ttl=0.0,
        exists_seconds=20,
        get_seconds=20,
        set_seconds=20,
    )
    served = 0
    for _ in range(30):
        names = h.names(8)
        memory = h.filled(stack, names)
        stored = stack.batch_set_from(stack.keys(names), memory.pages)
        expect_statuses(stored, [{Status.OK, Status.FAILED}] * 8, "batch_set_from of a flaky store")
        served += sum(map(bool, h.check(stack, names, [MISS | {Status.OK}] * 8)))
    require(served > 0, "a flaky store served nothing at all")


@case("faults")
def failing_on_the_nth_call(h: Harness) -> None:
    """Whichever call is the first to fail, all before it are right and all after it are misses.

    sglang#38428: inject at every call.
    """
    for n in range(8):
        stack = h.stack(faulty(fail_after=n), negative_ttl=0.0)
        name = h.names(1)
        memory = h.filled(stack, name)
        keys = stack.keys(name)
        for _ in range(4):
            put = stack.batch_set_from(keys, memory.pages)
            there = stack.batch_exists(keys)
            expect_statuses(put, [{Status.OK, Status.FAILED}], "batch_set_from")
            require(there[0] in (True, False), f"batch_exists answers {there!r}")
            h.check(stack, name, [MISS | {Status.OK}])


@case("faults")
def nonsense_answers_are_misses(h: Harness) -> None:
    """Answers of the wrong length or kind are misses: None, a negative errno, too few, too many.

    v1 defaults return None, NIXL one boolean a batch (survey facts 2 and 5); a negative errno is truthy.
    """
    babblers: list[Babbler] = []

    def wrap(storage: Any) -> Babbler:
        babblers.append(Babbler(storage))
        return babblers[0]

    stack = h.stack(wrap, integrity=False, breaker_failures=10_000)
    names = h.names(3)
    memory = h.filled(stack, names)
    for answer in (
        None,
        True,
        -5,
        [],
        [True],
        [-2, -2, -2],
        ["ok"] * 3,
        [1, 1, 1],
        [Status.OK] * 4,
        [None] * 3,
    ):
        babblers[0].answer = answer
        found = stack.batch_exists(stack.keys(names))
        expect_presence(found, [False] * 3, f"batch_exists when the store says {answer!r}")
        for call in (stack.batch_get_into, stack.batch_set_from):
            statuses = call(stack.keys(names), memory.pages)
            expect_statuses(statuses, [MISS] * 3, f"a batch when the store says {answer!r}")


@case("faults")
def existence_that_lies_is_paid_once(h: Harness) -> None:
    """A key that was said to exist and could not be read counts as absent for a while.

    sglang#31315: metadata says present after the only segment died; each request repeats exists -> get.
    """
    liars: list[Liar] = []

    def wrap(storage: Any) -> Liar:
        liars.append(Liar(storage))
        return liars[0]

    stack = h.stack(wrap, negative_ttl=60.0)
    names = h.names(5)
    expect_presence(stack.batch_exists(names), [True] * 5, "the lie, the first time")
    h.check(stack, names, [MISS] * 5)
    expect_presence(stack.batch_exists(names), [False] * 5, "the lie, the second time")
