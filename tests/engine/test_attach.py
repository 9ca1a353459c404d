"""The storage comes and goes while the engine runs, and never while it is used."""

import gc
import threading
import weakref

import pytest

from hicache_storage import BusyError, ClosedError, RequestError, SettingsError, StorageError
from hicache_storage.engine import KVShape, Source, TierEngine, page_hashes

SHAPE = KVShape.parse("mha:2x2x8:bf16")
PAGE = 4


@pytest.fixture
def engine():
    with TierEngine(
        SHAPE, PAGE, l1_tokens=12 * PAGE, prefetch_policy="wait_complete", prefetch_threshold=PAGE
    ) as engine:
        yield engine


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def forget(engine):
    engine.flush_l1()
    engine.flush_l2()


def test_an_attached_storage_gets_and_gives_pages(engine, storage):
    engine.attach(storage)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    forget(engine)
    report = engine.prefill(prompt(5))
    assert report.sources == (Source.L3,) * 5
    assert report.wrong_bytes == 0


def test_pages_that_were_there_before_go_to_l3_when_they_are_used_again(engine, storage):
    engine.prefill(prompt(5))
    engine.attach(storage)
    assert storage.pages == {}
    engine.prefill(prompt(3))
    assert engine.wait_for_backup(10)
    assert set(storage.pages) == set(page_hashes(prompt(3), PAGE))


def test_l2_is_registered_while_the_storage_is_attached(engine, storage):
    engine.attach(storage)
    (buffer,) = storage.registered
    assert buffer.nbytes == engine.l2_nbytes
    engine.detach()
    assert storage.registered == []
    engine.attach(storage)
    assert storage.registered == [buffer]


def test_a_detached_storage_is_left_alone(engine, storage):
    engine.attach(storage)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    engine.detach()
    for method in ("exists", "get", "set"):
        storage.before[method] = lambda key: pytest.fail(f"asked for {key}")
    assert engine.prefill(prompt(5)).sources == (Source.L1,) * 5
    forget(engine)
    assert engine.prefill(prompt(5)).pages(Source.RECOMPUTED) == 5
    assert engine.stats.storage_errors == 0


def test_the_next_storage_is_not_believed_to_have_what_the_last_one_had(engine, storage, other):
    engine.attach(storage)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    engine.detach()
    engine.attach(other)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    assert other.pages == storage.pages
    assert len(other.pages) == 5


def test_a_second_storage_is_refused(engine, storage, other):
    engine.attach(storage)
    with pytest.raises(RequestError, match="detach it first"):
        engine.attach(other)
    assert other.registered == []
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    assert len(storage.pages) == 5


def test_a_storage_that_cannot_register_l2_is_not_attached(engine, storage, other, monkeypatch):
    def refuse(_buffer):
        raise StorageError("no room for registrations")

    monkeypatch.setattr(storage, "register_buffer", refuse)
    with pytest.raises(StorageError, match="no room for registrations"):
        engine.attach(storage)
    assert engine.prefill(prompt(5)).wrong_bytes == 0
    engine.attach(other)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    assert len(other.pages) == 5


def test_a_storage_of_another_layout_is_not_attached(engine, storage):
    storage.namespace = SHAPE.namespace(PAGE, "page_first")
    with pytest.raises(SettingsError, match="layer_first"):
        engine.attach(storage)
    assert storage.registered == []


def test_nothing_is_detached_while_a_request_waits(engine, storage):
    engine.attach(storage)
    waiting = engine.prefetch(prompt(5))
    with pytest.raises(BusyError, match="detach: requests that wait: 1"):
        engine.detach()
    engine.cancel(waiting)
    assert engine.wait_for_backup(10)
    engine.detach()


def test_nothing_is_attached_while_a_request_waits(engine, storage):
    waiting = engine.prefetch(prompt(5))
    with pytest.raises(BusyError, match="attach: requests that wait: 1"):
        engine.attach(storage)
    engine.prefill(prompt(5), waiting)
    engine.attach(storage)


def test_nothing_is_detached_while_a_request_runs(engine, storage, gate):
    engine.attach(storage)
    storage.before["exists"] = gate
    request = threading.Thread(target=engine.prefill, args=(prompt(5),))
    request.start()
    assert gate.reached.wait(10)
    with pytest.raises(BusyError, match="detach: requests that run: 1") as caught:
        engine.detach()
    assert caught.value.retryable
    gate.opened.set()
    request.join()
    assert engine.wait_for_backup(10)
    engine.detach()


def test_nothing_is_detached_while_a_backup_is_under_way(engine, storage, gate):
    engine.attach(storage)
    storage.before["set"] = gate
    engine.prefill(prompt(5))
    assert gate.reached.wait(10)
    with pytest.raises(BusyError, match="on their way to or from L3; wait_for_backup first"):
        engine.detach()
    gate.opened.set()
    assert engine.wait_for_backup(10)
    engine.detach()
    assert len(storage.pages) == 5


def test_nothing_is_detached_while_a_read_is_under_way_that_nobody_waits_for(engine, storage, gate):
    engine.attach(storage)
    engine.prefill(prompt(5))
    assert engine.wait_for_backup(10)
    forget(engine)
    storage.before["get"] = gate
    waiting = engine.prefetch(prompt(5))
    assert gate.reached.wait(10)
    engine.cancel(waiting)
    with pytest.raises(BusyError, match="on their way"):
        engine.detach()
    gate.opened.set()
    assert engine.wait_for_backup(10)
    engine.detach()
    assert engine.stats.l2_resident == 0


def test_detaching_what_is_not_attached_does_nothing(engine):
    engine.detach()
    assert engine.prefill(prompt(2)).wrong_bytes == 0


def test_a_closed_engine_takes_no_storage(engine, storage):
    engine.close()
    with pytest.raises(ClosedError):
        engine.attach(storage)
    with pytest.raises(ClosedError):
        engine.detach()
    assert storage.registered == []


def test_errors_of_a_storage_stay_counted_when_it_is_gone(engine, storage):
    def fail(_key):
        raise StorageError("gone")

    engine.attach(storage)
    storage.before["exists"] = fail
    engine.prefill(prompt(2))
    assert engine.wait_for_backup(10)
    engine.detach()
    assert engine.stats.storage_errors == 1


@pytest.mark.usefixtures("no_leaks")
def test_a_storage_that_comes_and_goes_leaves_nothing_behind(storage):
    with TierEngine(SHAPE, PAGE, l1_tokens=12 * PAGE, prefetch_threshold=PAGE) as engine:
        for salt in range(50):
            engine.attach(storage)
            assert engine.prefill(prompt(5, salt)).wrong_bytes == 0
            assert engine.wait_for_backup(10)
            engine.detach()
        gone = weakref.ref(engine._tiers.l2.buffer.owner)
    del engine
    gc.collect()
    assert gone() is None
    assert len(storage.pages) == 250


def test_ranks_detach_and_attach_together(open_team):
    team = open_team("mha:4x4x8:bf16", tp=2)
    team.prefill(prompt(5))
    team.each(lambda engine: engine.wait_for_backup(60))
    team.each(lambda engine: engine.detach())
    assert [storage.registered for storage in team.storages] == [[], []]
    team.each(lambda engine: (engine.flush_l1(), engine.flush_l2()))
    assert team.hits(prompt(5)) == {0}
    team.each(lambda engine: engine.attach(team.storages[team.engines.index(engine)]))
    team.forget()
    assert team.hits(prompt(5)) == {5}


def test_no_rank_detaches_while_another_one_writes(open_team, gate):
    team = open_team("mha:4x4x8:bf16", tp=2)
    team.storages[1].before["set"] = gate
    team.prefill(prompt(5))
    assert gate.reached.wait(10)
    assert team.engines[0].wait_for_backup(60)
    errors = team.errors(lambda engine: engine.detach())
    assert [type(error) for error in errors] == [BusyError, BusyError]
    gate.opened.set()
    team.forget()
    assert team.hits(prompt(5)) == {5}


def test_a_storage_that_one_rank_cannot_attach_is_attached_on_none(open_team, monkeypatch):
    def refuse(_buffer):
        raise StorageError("no room for registrations")

    team = open_team("mha:4x4x8:bf16", tp=2)
    team.each(lambda engine: engine.detach())
    monkeypatch.setattr(team.storages[1], "register_buffer", refuse)

    def attach(engine):
        engine.attach(team.storages[team.engines.index(engine)])

    errors = [str(error) for error in team.errors(attach)]
    assert errors == ["another rank could not attach its storage", "no room for registrations"]
    assert [storage.registered for storage in team.storages] == [[], []]
    assert team.hits(prompt(5)) == {0}
    monkeypatch.undo()
    team.each(attach)
    team.forget()
