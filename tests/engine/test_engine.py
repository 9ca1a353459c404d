"""TierEngine with real pools: every way of a page, byte for byte."""

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from hicache_storage import ClosedError, SettingsError, Status, StorageError, UnavailableError
from hicache_storage.engine import COPIED_BY, LAYOUTS, KVShape, Source, TierEngine, page_hashes

SHAPES = ["mha:2x2x8:bf16", "mla:3x64:bf16", "mha:2x1x3:fp8_e4m3"]
POLICIES = ["best_effort", "wait_complete", "timeout"]
COMBINATIONS = [
    (layout, io_backend, shape)
    for layout in LAYOUTS.values()
    for io_backend in COPIED_BY[layout.name]
    for shape in SHAPES
    if shape.partition(":")[0] in layout.attentions
]
PAGE = 4


def open_engine(storage, shape=SHAPES[0], pages=12, **options):
    options = {
        "prefetch_policy": "wait_complete",
        "prefetch_threshold": PAGE,
        **options,
    }
    return TierEngine(KVShape.parse(shape), PAGE, l1_tokens=pages * PAGE, storage=storage, **options)


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def conversations(count, seed):
    """Prompts that share prefixes in a tree, far more pages than L1 and L2 hold."""
    rng = random.Random(seed)
    for _ in range(count):
        tokens = []
        for _ in range(rng.randint(1, 5)):
            tokens += prompt(2, salt=rng.randrange(4))
        yield tokens + list(range(rng.randrange(PAGE)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("layout", "io_backend", "shape"), COMBINATIONS)
def test_pages_come_back_byte_for_byte_from_every_tier(storage, layout, io_backend, shape, policy):
    with open_engine(
        storage, shape, mem_layout=layout.name, io_backend=io_backend, prefetch_policy=policy
    ) as engine:
        reports = []
        for tokens in conversations(120, seed=1):
            waiting = engine.prefetch(tokens)
            if waiting.operation is not None:
                waiting.operation.done.wait(10)
            reports.append(engine.prefill(tokens, waiting))
        assert engine.wait_for_backup(30)
        stats = engine.stats
    assert sum(report.wrong_bytes for report in reports) == 0
    assert all(any(report.pages(source) for report in reports) for source in Source)
    assert stats.l1_evicted > 100
    assert stats.l2_evicted > 100
    assert stats.dropped == stats.backup_failed == stats.storage_errors == 0
    assert stats.backed_up == sum(report.pages(Source.RECOMPUTED) for report in reports)


def test_a_report_says_where_each_page_came_from(storage):
    with open_engine(storage) as engine:
        first = engine.prefill([*prompt(3), 1, 2])
        assert first.sources == (Source.RECOMPUTED,) * 3
        assert (first.tokens, first.hit_tokens, first.tokens_from(Source.RECOMPUTED)) == (14, 0, 14)
        assert first.nbytes(Source.RECOMPUTED) == 3 * engine.page_nbytes
        assert engine.prefill(prompt(3)).sources == (Source.L1,) * 3
        assert engine.wait_for_backup(10)
        assert engine.flush_l1() == 3
        assert engine.prefill(prompt(3)).sources == (Source.L2,) * 3
        assert (engine.flush_l1(), engine.flush_l2()) == (3, 3)
        again = engine.prefill(prompt(4))
        assert again.sources == (Source.L3,) * 3 + (Source.RECOMPUTED,)
        assert again.seconds[Source.L3] > 0
        assert again.hit_tokens == 12


def test_a_request_without_a_full_page_is_all_computed(storage):
    with open_engine(storage) as engine:
        report = engine.prefill([1, 2, 3])
        assert (report.sources, report.tokens_from(Source.RECOMPUTED)) == ((), 3)
        assert engine.prefill([]).tokens == 0


def test_without_a_storage_there_are_two_tiers():
    with open_engine(None) as engine:
        assert engine.prefill(prompt(10)).wrong_bytes == 0
        engine.flush_l1()
        assert engine.prefill(prompt(10)).sources == (Source.L2,) * 10
        engine.flush_l1()
        assert engine.flush_l2() == 10
        assert engine.prefill(prompt(10)).pages(Source.RECOMPUTED) == 10
        assert engine.stats.dropped == 0


def test_a_second_engine_finds_what_the_first_one_stored(storage):
    with open_engine(storage, mem_layout="layer_first") as engine:
        engine.prefill(prompt(10))
        assert engine.wait_for_backup(10)
    with open_engine(storage, mem_layout="page_first_direct") as engine:
        report = engine.prefill(prompt(10))
        assert report.sources == (Source.L3,) * 10
        assert report.wrong_bytes == 0


class Failing:
    """Ways in which a storage fails, by name."""

    @staticmethod
    def raises(*_):
        raise UnavailableError("gone")

    @staticmethod
    def raises_anything(*_):
        raise ZeroDivisionError

    @staticmethod
    def none(*_):
        return None

    @staticmethod
    def nothing(*_):
        return []

    @staticmethod
    def failed(keys, *_):
        return [Status.FAILED] * len(keys)

    @staticmethod
    def truthy(keys, *_):
        return [-5] * len(keys)

    @staticmethod
    def too_many(keys, *_):
        return [Status.MISSING] * (len(keys) + 5)


FAILURES = ["raises", "raises_anything", "none", "nothing", "failed", "truthy", "too_many"]


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("method", ["batch_exists", "batch_get_into", "batch_set_from"])
def test_a_storage_that_fails_costs_hits_and_nothing_else(storage, monkeypatch, method, failure):
    monkeypatch.setattr(storage, method, getattr(Failing, failure))
    with open_engine(storage, backup_wait=2.0) as engine:
        reports = [engine.prefill(tokens) for tokens in conversations(60, seed=2)]
        assert engine.wait_for_backup(10)
        stats = engine.stats
        monkeypatch.undo()
        engine.flush_l1()
        engine.flush_l2()
        engine.prefill(prompt(8))
        assert engine.wait_for_backup(10)
        engine.flush_l1()
        engine.flush_l2()
        healed = engine.prefill(prompt(8))
    assert sum(report.wrong_bytes for report in reports) == 0
    if method != "batch_exists" or failure != "truthy":
        assert sum(report.pages(Source.L3) for report in reports) == 0
    assert method != "batch_set_from" or stats.backed_up == 0
    assert (stats.storage_errors > 0) == failure.startswith("raises")
    assert healed.sources == (Source.L3,) * 8


def test_a_failed_backup_is_tried_again_when_the_page_is_used_again(storage, monkeypatch):
    monkeypatch.setattr(storage, "batch_set_from", Failing.failed)
    with open_engine(storage) as engine:
        engine.prefill(prompt(5))
        assert engine.wait_for_backup(10)
        assert engine.stats.backup_failed == 5
        assert storage.pages == {}
        monkeypatch.undo()
        engine.prefill(prompt(5))
        assert engine.wait_for_backup(10)
    assert len(storage.pages) == 5


def test_a_page_that_waits_for_its_backup_is_not_queued_again(storage, gate):
    keys = []
    storage.before["set"] = lambda key: keys.append(key) or gate(key)
    with open_engine(storage) as engine:
        engine.prefill(prompt(5))
        engine.prefill(prompt(5))
        gate.opened.set()
        assert engine.wait_for_backup(10)
    assert sorted(keys) == sorted(page_hashes(prompt(5), PAGE))


@pytest.mark.parametrize("tier", ["L1", "L2", "L3"])
def test_one_flipped_byte_in_any_tier_is_seen(storage, tier):
    tokens = prompt(5)
    with open_engine(storage) as engine:
        assert engine.prefill(tokens).wrong_bytes == 0
        assert engine.wait_for_backup(10)
        node = engine._tiers.tree.match(page_hashes(tokens, PAGE))[3]
        if tier == "L1":
            page = engine._tiers.l1.pages[node.slots[0]]
            page[0, 1, 2, 1, 0] ^= 0x0100
        elif tier == "L2":
            engine._tiers.l2.page(node.slots[1])[1].view[9] ^= 0x01
            engine.flush_l1()
        else:
            engine.flush_l1()
            engine.flush_l2()
            page = bytearray(storage.pages[node.page_hash])
            page[9] ^= 0x80
            storage.pages[node.page_hash] = bytes(page)
        report = engine.prefill(tokens)
        assert report.sources[3].value == tier
        assert report.wrong_bytes == 1


def test_a_storage_that_serves_other_pages_is_found_out(storage):
    with open_engine(storage) as engine:
        engine.prefill(prompt(8))
        assert engine.wait_for_backup(10)
        engine.flush_l1()
        engine.flush_l2()
        backwards = reversed(list(storage.pages.values()))
        storage.pages = dict(zip(list(storage.pages), backwards, strict=True))
        assert engine.prefill(prompt(8)).wrong_bytes > 0


def test_l2_keeps_pages_until_l3_has_them(storage, gate):
    storage.before["set"] = gate
    with open_engine(storage, backup_wait=30.0) as engine:
        engine.prefill(prompt(10))
        engine.prefill(prompt(10, salt=1))
        engine.flush_l1()
        assert engine.flush_l2() == 0
        timer = threading.Timer(0.2, gate.opened.set)
        timer.start()
        assert engine.prefill(prompt(10, salt=2)).wrong_bytes == 0  # waits for room in L2
        timer.join()
        assert engine.stats.dropped == 0
        assert engine.wait_for_backup(10)
    assert len(storage.pages) == 30


def test_under_pressure_backups_are_dropped_and_counted(storage, gate):
    storage.before["set"] = gate
    with open_engine(storage, backup_wait=0.05) as engine:
        began = time.monotonic()
        for salt in range(6):
            assert engine.prefill(prompt(10, salt)).wrong_bytes == 0
        assert time.monotonic() - began < 5
        stats = engine.stats
        assert stats.backup_failed >= 30
        assert stats.dropped >= 30
        gate.opened.set()
        assert engine.wait_for_backup(10)
    assert len(storage.pages) >= 10


def test_a_request_larger_than_l1_is_refused(storage):
    with open_engine(storage) as engine:
        with pytest.raises(ValueError, match=r"13 pages\) does not fit in L1 of 12 pages; raise l1_tokens"):
            engine.prefill(prompt(13))
        assert engine.prefill(prompt(12)).wrong_bytes == 0


@pytest.mark.parametrize(
    ("option", "value", "choices"),
    [
        ("mem_layout", "page_last", "layer_first, page_first, page_first_direct, page_head"),
        ("io_backend", "rdma", "direct, kernel"),
        ("write_policy", "write_around", "write_through, write_through_selective, write_back"),
        ("prefetch_policy", "never", "best_effort, wait_complete, timeout"),
        ("device", "tpu", "cpu, cuda"),
    ],
)
def test_an_option_that_is_not_there_names_the_choices(storage, option, value, choices):
    with pytest.raises(SettingsError, match=f"{option} '{value}' is none of: {choices}"):
        open_engine(storage, **{option: value})
    assert storage.registered == []


@pytest.mark.usefixtures("no_leaks")
def test_a_storage_that_cannot_register_l2_fails_the_engine(storage, monkeypatch):
    def refuse(_buffer):
        raise StorageError("memlock")

    monkeypatch.setattr(storage, "register_buffer", refuse)
    with pytest.raises(StorageError, match="memlock"):
        open_engine(storage)


def test_l2_is_registered_once_as_a_whole(storage):
    with open_engine(storage) as engine:
        (buffer,) = storage.registered
        assert buffer.nbytes == engine.l2_nbytes == 24 * engine.page_nbytes
        engine.prefill(prompt(4))
    assert storage.registered == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("layout", "io_backend", "shape"), COMBINATIONS)
def test_pages_come_back_byte_for_byte_from_a_cuda_device(storage, layout, io_backend, shape):
    if io_backend == "kernel":
        pytest.skip("no kernels yet")
    with open_engine(storage, shape, mem_layout=layout.name, io_backend=io_backend, device="cuda") as engine:
        assert engine.memory_kind.startswith("pinned")
        reports = [engine.prefill(tokens) for tokens in conversations(120, seed=1)]
    assert sum(report.wrong_bytes for report in reports) == 0
    assert all(any(report.pages(source) for report in reports) for source in Source)


@pytest.mark.usefixtures("no_leaks")
def test_a_hundred_engines_leave_nothing_behind(storage):
    memory = []
    for salt in range(100):
        with open_engine(storage) as engine:
            memory.append(weakref.ref(engine._tiers.l2.buffer.owner))
            assert engine.prefill(prompt(10, salt)).wrong_bytes == 0
            if salt % 2:
                engine.prefetch(prompt(3, salt + 1))
    del engine
    gc.collect()
    assert storage.registered == []
    assert [owner for owner in memory if owner() is not None] == []


def test_a_closed_engine_lets_go_of_its_memory_at_once(storage):
    engine = open_engine(storage)
    owner = weakref.ref(engine._tiers.l2.buffer.owner)
    engine.prefill(prompt(10))
    while engine._tiers.traffic.controller.events.empty():  # a backup that nobody has asked about
        time.sleep(0.002)
    gc.disable()
    try:
        engine.close()
        assert owner() is None
    finally:
        gc.enable()


def test_closing_twice_is_fine_and_using_a_closed_engine_is_not(storage):
    engine = open_engine(storage)
    engine.close()
    engine.close()
    for call in (engine.prefill, engine.prefetch):
        with pytest.raises(ClosedError):
            call(prompt(1))
    for call in (engine.flush_l1, engine.flush_l2, engine.wait_for_backup):
        with pytest.raises(ClosedError):
            call()


def test_a_call_that_never_returns_does_not_hold_up_close_for_ever(storage, gate, monkeypatch, caplog):
    monkeypatch.setattr("hicache_storage.engine.engine._CLOSE_SECONDS", 0.1)
    storage.before["set"] = gate
    engine = open_engine(storage)
    engine.prefill(prompt(3))
    assert gate.reached.wait(10)
    engine.close()
    assert "does not return" in caplog.text
    assert len(storage.registered) == 1  # the call may still read L2
    gate.opened.set()


def test_threads_that_share_an_engine_take_turns(storage):
    wrong = []

    def run(seed):
        wrong.extend(engine.prefill(tokens).wrong_bytes for tokens in conversations(40, seed))

    with open_engine(storage) as engine:
        threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == [0] * 160
