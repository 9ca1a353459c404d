"""A dead backend costs nothing, and errors end here."""

import threading

import pytest

from hicache_conformance.pages import GuardedPages
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import (
    CapacityError,
    ClosedError,
    DeadlineError,
    InvalidKeyError,
    Namespace,
    Status,
    UnavailableError,
)
from hicache_storage.layers.breaker import BreakerLayer, BreakerPolicy, KeyMemory

POLICY = BreakerPolicy(failures=3, cooldown=0.01, max_cooldown=0.05, negative_ttl=60)


class Moody(ReferenceStorage):
    """Raises ``error`` while it is set, and counts the calls that reach it."""

    def __init__(self):
        super().__init__(None, Namespace())
        self.error = None
        self.calls = 0
        self.probed = threading.Event()

    def answer(self, value):
        self.calls += 1
        if self.error is not None:
            raise self.error
        return value

    def batch_exists(self, keys):
        if keys[0].endswith("/probe"):
            self.probed.set()
        return self.answer(super().batch_exists(keys))

    def batch_get_into(self, keys, pages):
        return self.answer(super().batch_get_into(keys, pages))

    def batch_set_from(self, keys, pages):
        return self.answer(super().batch_set_from(keys, pages))


@pytest.fixture
def inner():
    return Moody()


@pytest.fixture
def storage(inner):
    with BreakerLayer(inner, POLICY) as layer:
        yield layer


def wait_closed(storage):
    for _ in range(1000):
        if not storage.open:
            return
        threading.Event().wait(0.005)
    pytest.fail("the breaker did not close")


def test_failures_look_like_misses(inner, storage):
    memory = GuardedPages(2, [8])
    inner.error = UnavailableError("down")
    assert storage.batch_exists(["a", "b"]) == [False, False]
    assert storage.batch_get_into(["a", "b"], memory.pages) == [Status.FAILED] * 2
    assert storage.batch_set_from(["a", "b"], memory.pages) == [Status.FAILED] * 2


def test_an_error_that_no_author_foresaw_is_a_miss_too(inner, storage):
    inner.error = RuntimeError("surprise")
    assert storage.batch_exists(["a"]) == [False]


def test_a_backend_that_keeps_failing_is_not_asked_any_more(inner, storage):
    inner.error = UnavailableError("down")
    policy_without_probe = BreakerPolicy(failures=3, cooldown=60)
    with BreakerLayer(inner, policy_without_probe) as patient:
        for _ in range(10):
            assert patient.batch_exists(["a"]) == [False]
        assert inner.calls == 3


def test_one_timeout_is_enough(inner):
    with BreakerLayer(inner, BreakerPolicy(failures=3, cooldown=60)) as patient:
        inner.error = DeadlineError("late")
        patient.batch_exists(["a"])
        calls = inner.calls
        assert patient.batch_set_from(["a"], GuardedPages(1, [8]).pages) == [Status.FAILED]
        assert inner.calls == calls


def test_a_backend_that_answers_again_is_used_again(inner, storage):
    memory = GuardedPages(1, [8])
    inner.error = DeadlineError("late")
    storage.batch_exists(["a"])
    assert storage.open
    inner.error = None
    wait_closed(storage)
    assert storage.batch_set_from(["a"], memory.pages) == [Status.OK]
    assert storage.batch_exists(["a"]) == [True]


def test_refused_writes_do_not_stop_reads(inner, storage):
    memory = GuardedPages(1, [8])
    assert all(storage.batch_set_from(["a"], memory.pages))
    working = inner.batch_set_from
    inner.batch_set_from = lambda keys, pages: [Status.of(CapacityError("full"))] * len(keys)
    for _ in range(5):
        assert storage.batch_set_from(["b"], memory.pages) == [Status.FAILED]
        assert storage.batch_exists(["a"]) == [True]
    inner.batch_set_from = working


def test_a_page_that_is_there_but_cannot_be_read_is_absent_for_a_while(inner, storage):
    memory = GuardedPages(2, [8])
    assert all(storage.batch_set_from(["a", "b"], memory.pages))
    assert storage.batch_exists(["a", "b"]) == [True, True]
    inner.store["a"] = b"not its size"
    assert storage.batch_get_into(["a", "b"], memory.pages) == [Status.CORRUPT, Status.OK]
    assert storage.batch_exists(["a", "b"]) == [False, True]
    assert storage.batch_set_from(["a"], [memory.pages[0]]) == [Status.OK]
    assert storage.batch_exists(["a"]) == [True]


def test_a_plain_miss_is_not_remembered(inner, storage):
    memory = GuardedPages(1, [8])
    assert storage.batch_get_into(["a"], memory.pages) == [Status.MISSING]
    inner.store["a"] = b"8 bytes!"
    assert storage.batch_exists(["a"]) == [True]


def test_the_memory_of_absent_keys_is_bounded_and_forgets():
    memory = KeyMemory(ttl=60, limit=3)
    memory.add("abcde")
    assert len(memory) == 3
    assert "e" in memory
    assert "a" not in memory
    forgetful = KeyMemory(ttl=0, limit=3)
    forgetful.add("a")
    assert "a" not in forgetful


@pytest.mark.parametrize("answer", [[], [True], [-5, 1], None, [Status.OK]])
def test_an_answer_of_the_wrong_form_is_no_hit(answer, inner, storage):
    memory = GuardedPages(2, [8])
    inner.batch_get_into = lambda keys, pages: answer
    inner.batch_exists = lambda keys: answer
    assert storage.batch_get_into(["a", "b"], memory.pages) == [Status.FAILED] * 2
    assert storage.batch_exists(["a", "b"]) == [False, False]


def test_the_callers_own_mistakes_come_through(inner, storage):
    inner.error = InvalidKeyError("mend the call")
    with pytest.raises(InvalidKeyError):
        storage.batch_exists(["a"])
    assert not storage.open


def test_a_closed_storage_says_so_and_leaves_no_thread(inner, no_leaks):
    storage = BreakerLayer(inner, POLICY)
    inner.error = DeadlineError("late")
    storage.batch_exists(["a"])
    assert inner.probed.wait(5)
    storage.close()
    with pytest.raises(ClosedError):
        storage.batch_exists(["a"])
