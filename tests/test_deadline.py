"""Every call returns in time, and nothing touches the caller's memory afterwards."""

import threading

import pytest

from hicache_conformance.pages import GuardedPages
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import DeadlineError, Namespace, Status, UnavailableError, time_left
from hicache_storage.batch_pool import BatchPool
from hicache_storage.bounce import BOUNCE_NBYTES
from hicache_storage.deadline import deadline
from hicache_storage.errors import ClosedError, InvalidKeyError
from hicache_storage.layers.deadline import DeadlineLayer, Deadlines

FAST = Deadlines(exists=0.1, get=0.1, set=0.1)


class Gated(ReferenceStorage):
    """Hangs until the test opens the gate; says when it hangs and when it is through."""

    def __init__(self):
        super().__init__(None, Namespace())
        self.gate = threading.Event()
        self.gate.set()
        self.through = threading.Event()

    def get(self, key):
        self.gate.wait()
        value = super().get(key)
        self.through.set()
        return value

    def set(self, key, value):
        self.gate.wait()
        super().set(key, value)
        self.through.set()

    def exists(self, key):
        self.gate.wait()
        return super().exists(key)


@pytest.fixture
def inner():
    backend = Gated()
    yield backend
    backend.gate.set()


@pytest.fixture
def storage(inner):
    layer = DeadlineLayer(inner, FAST)
    yield layer
    inner.gate.set()
    layer.close()


def test_a_hung_read_is_timed_out_and_never_lands_in_the_page(inner, storage):
    memory = GuardedPages(2, [64, 32])
    memory.fill(seed=1)
    assert all(storage.batch_set_from(["a", "b"], memory.pages))
    memory.blank()
    inner.gate.clear()
    inner.through.clear()
    assert storage.batch_get_into(["a", "b"], memory.pages) == [Status.TIMED_OUT] * 2
    before = memory.fingerprint()
    inner.gate.set()
    assert inner.through.wait(5)
    storage.exists("a")  # the pool has gone on to other work
    assert memory.fingerprint() == before


def test_a_hung_write_stores_what_the_page_held_when_it_was_called(inner, storage):
    memory = GuardedPages(1, [64])
    memory.fill(seed=1)
    written = memory.content(0)
    inner.gate.clear()
    inner.through.clear()
    assert storage.batch_set_from(["a"], memory.pages) == [Status.TIMED_OUT]
    memory.blank()
    inner.gate.set()
    assert inner.through.wait(5)
    assert inner.store["a"] == written


def test_a_hung_lookup_raises_a_deadline_error(inner, storage):
    inner.gate.clear()
    with pytest.raises(DeadlineError):
        storage.batch_exists(["a"])


def test_the_backends_own_error_comes_through(inner, storage):
    def fail(keys):
        raise UnavailableError("down")

    inner.batch_exists = fail
    with pytest.raises(UnavailableError, match="down"):
        storage.batch_exists(["a"])


@pytest.fixture
def patient(inner):
    layer = DeadlineLayer(inner, Deadlines(60, 60, 60))
    yield layer
    layer.close()


def test_batches_larger_than_the_bounce_memory_move_whole(patient):
    memory = GuardedPages(5, [BOUNCE_NBYTES // 4, 5])
    memory.fill(seed=2)
    written = [memory.content(i) for i in range(5)]
    keys = list("abcde")
    assert all(patient.batch_set_from(keys, memory.pages))
    memory.blank()
    assert all(patient.batch_get_into(keys, memory.pages))
    assert [memory.content(i) for i in range(5)] == written
    assert memory.guards_intact()


def test_a_page_larger_than_the_bounce_memory_moves_too(inner, patient):
    memory = GuardedPages(1, [BOUNCE_NBYTES + 3])
    memory.fill(seed=2)
    assert all(patient.batch_set_from(["a"], memory.pages))
    assert inner.store["a"] == memory.content(0)


def test_an_error_in_one_part_of_a_large_batch_costs_that_part_only(inner, patient):
    memory = GuardedPages(4, [BOUNCE_NBYTES])
    memory.fill(seed=2)
    put = inner.batch_set_from

    def fail_for_c(keys, pages):
        if "c" in keys:
            raise UnavailableError("down")
        return put(keys, pages)

    inner.batch_set_from = fail_for_c
    statuses = patient.batch_set_from(list("abcd"), memory.pages)
    assert statuses == [Status.OK, Status.OK, Status.FAILED, Status.OK]


def test_the_callers_own_mistake_in_one_part_is_told(inner, patient):
    memory = GuardedPages(3, [BOUNCE_NBYTES])

    def refuse(keys, pages):
        raise InvalidKeyError("no key of ours")

    inner.batch_get_into = refuse
    with pytest.raises(InvalidKeyError):
        patient.batch_get_into(list("abc"), memory.pages)


def test_close_does_not_wait_for_a_hung_backend(inner):
    layer = DeadlineLayer(inner, FAST)
    inner.close = inner.gate.wait
    inner.gate.clear()
    layer.CLOSE_SECONDS = 0.1
    layer.close()


def test_a_tighter_outer_deadline_stays_in_force():
    with deadline(10), deadline(100):
        assert time_left() <= 10
    with deadline(100), deadline(10):
        assert time_left() <= 10
    assert time_left() is None


def test_the_threads_of_a_pool_know_the_callers_deadline():
    pool = BatchPool(2, "test")
    seen = []
    with deadline(30):
        pool.run(4, lambda i, lease: seen.append(time_left()) or Status.OK)
    pool.close()
    assert all(0 < left <= 30 for left in seen)


def test_a_withdrawn_lease_stops_the_thread_that_held_it():
    pool = BatchPool(1, "test")
    release, ended = threading.Event(), threading.Event()
    touched = []

    def work(i, lease):
        release.wait()
        try:
            with lease.held():
                touched.append(i)
        finally:
            ended.set()
        return Status.OK

    with deadline(0.05):
        assert pool.run(1, work) == [Status.TIMED_OUT]
    release.set()
    assert ended.wait(5)
    pool.close()
    assert touched == []


def test_an_unforeseen_error_costs_one_page_and_keeps_the_thread(caplog):
    pool = BatchPool(1, "test")

    def work(i, lease):
        if i == 1:
            raise ZeroDivisionError
        return Status.OK

    assert pool.run(3, work) == [Status.OK, Status.FAILED, Status.OK]
    assert pool.run(1, work) == [Status.OK]
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.run(1, work)


def test_a_closed_pool_leaves_no_thread(no_leaks):
    for _ in range(20):
        pool = BatchPool(4, "test")
        pool.run(8, lambda i, lease: Status.OK)
        pool.close()


def test_eight_callers_share_a_pool_and_each_gets_its_own_answers():
    pool = BatchPool(4, "test")
    answers = {}

    def caller(number):
        done = []
        statuses = pool.run(50, lambda i, lease: done.append(i) or Status.OK)
        answers[number] = (statuses, sorted(done))

    threads = [threading.Thread(target=caller, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.close()
    assert all(answers[n] == ([Status.OK] * 50, list(range(50))) for n in range(8))
