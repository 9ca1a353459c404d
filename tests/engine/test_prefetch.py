"""Prefetches: what they wait for, what they keep, and memory that a storage may still write to."""

import time

import pytest

from hicache_storage import BATCH_PAGES, SettingsError
from hicache_storage.engine import KVShape, Source, TierEngine, page_hashes
from hicache_storage.engine.page_objects import KV
from hicache_storage.engine.prefetch import PrefetchOperation, PrefetchPolicy

SHAPE = KVShape.parse("mha:2x2x8:bf16")
PAGE = 4


def open_engine(storage, policy="wait_complete", pages=32, **options):
    options = {"prefetch_threshold": PAGE, "backup_wait": 10.0, **options}
    return TierEngine(SHAPE, PAGE, l1_tokens=pages * PAGE, prefetch_policy=policy, storage=storage, **options)


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def store(storage, tokens):
    """Leave the tokens' pages in L3 and nowhere else."""
    with open_engine(storage, pages=max(32, len(tokens) // PAGE)) as engine:
        engine.prefill(tokens)
        assert engine.wait_for_backup(30)


def test_wait_complete_gets_all_that_l3_has(storage):
    store(storage, prompt(20))
    with open_engine(storage) as engine:
        report = engine.prefill(prompt(20) + prompt(2, salt=1))
        assert report.sources == (Source.L3,) * 20 + (Source.RECOMPUTED,) * 2
        assert report.wrong_bytes == 0


def test_best_effort_does_not_wait(storage, gate):
    store(storage, prompt(20))
    storage.before["get"] = gate
    with open_engine(storage, "best_effort") as engine:
        report = engine.prefill(prompt(20))
        assert report.pages(Source.RECOMPUTED) == 20
        gate.opened.set()
    assert report.wrong_bytes == 0


def test_best_effort_takes_what_has_come_while_the_request_waited(storage):
    store(storage, prompt(20))
    with open_engine(storage, "best_effort") as engine:
        waiting = engine.prefetch(prompt(20))
        assert waiting.operation.done.wait(10)
        report = engine.prefill(prompt(20), waiting)
        assert report.pages(Source.L3) == 20
        assert report.wrong_bytes == 0


def test_timeout_waits_as_long_as_the_tokens_are_worth(storage, gate):
    store(storage, prompt(20))
    storage.before["get"] = gate
    with open_engine(
        storage, "timeout", prefetch_timeout_base=0.1, prefetch_timeout_per_ki_token=2.0
    ) as engine:
        began = time.monotonic()
        report = engine.prefill(prompt(20))
        waited = time.monotonic() - began
        gate.opened.set()
    assert waited >= 0.1 + 2.0 * 20 * PAGE / 1024
    assert report.pages(Source.RECOMPUTED) == 20


def test_a_stopped_prefetch_keeps_the_batches_that_are_complete(storage, gate):
    tokens = prompt(BATCH_PAGES + 40)
    store(storage, tokens)
    in_second_batch = page_hashes(tokens, PAGE)[BATCH_PAGES + 5]
    storage.before["get"] = lambda key: gate(key) if key == in_second_batch else None
    with open_engine(storage, "best_effort", pages=200) as engine:
        waiting = engine.prefetch(tokens)
        assert gate.reached.wait(10)
        report = engine.prefill(tokens, waiting)
        gate.opened.set()
        assert report.sources == (Source.L3,) * BATCH_PAGES + (Source.RECOMPUTED,) * 40
        assert report.wrong_bytes == 0


def test_slots_of_a_batch_in_flight_are_not_reused_before_its_call_returns(storage, gate):
    """The storage writes its page after the request gave up: into memory that is nobody else's."""
    store(storage, prompt(20))
    storage.before["get"] = gate
    with open_engine(storage, "best_effort", pages=24, hicache_ratio=2.0, backup_wait=0.0) as engine:
        waiting = engine.prefetch(prompt(20))
        assert gate.reached.wait(10)
        in_flight = set(waiting.operation.slots)
        assert len(in_flight) == 20
        storage.pages = {key: b"\xee" * len(page) for key, page in storage.pages.items()}
        engine.prefill(prompt(20), waiting)
        used = set()
        for salt in range(1, 12):
            assert engine.prefill(prompt(20, salt)).wrong_bytes == 0
            used |= {node.slots[1] for node in engine._tiers.tree.nodes()} - {None}
        assert used.isdisjoint(in_flight)
        assert len(used) == 48 - 20
        gate.opened.set()
        storage.before.clear()
        assert engine.wait_for_backup(10)
        for salt in range(1, 12):  # L1 and L2 hold what they held, whatever the late call wrote
            assert engine.prefill(prompt(20, salt)).wrong_bytes == 0


def test_slots_of_a_stopped_prefetch_come_back_when_its_call_has_returned(storage, gate):
    store(storage, prompt(20))
    storage.before["get"] = gate
    with open_engine(storage, "best_effort") as engine:
        waiting = engine.prefetch(prompt(20))
        assert gate.reached.wait(10)
        engine.cancel(waiting)
        assert engine.stats.l2_resident == 20
        gate.opened.set()
        assert engine.wait_for_backup(10)
        assert engine.stats.l2_resident == 0


def test_a_prefetch_stopped_before_its_lookup_returns_never_reads(storage, gate):
    store(storage, prompt(20))
    storage.before["exists"] = gate
    read = []
    storage.before["get"] = read.append
    with open_engine(storage) as engine:
        waiting = engine.prefetch(prompt(20))
        assert gate.reached.wait(10)
        engine.cancel(waiting)
        assert engine.stats.l2_resident == 0
        gate.opened.set()
        assert waiting.operation.done.wait(10)
    assert read == []


def test_the_first_page_that_is_not_ok_ends_the_usable_prefix(storage):
    tokens = prompt(20)
    store(storage, tokens)
    hashes = page_hashes(tokens, PAGE)
    storage.pages[hashes[7]] = b"torn"
    with open_engine(storage) as engine:
        report = engine.prefill(tokens)
        assert report.sources == (Source.L3,) * 7 + (Source.RECOMPUTED,) * 13
        assert report.wrong_bytes == 0
        assert engine.stats.l2_resident == 20
        assert engine.wait_for_backup(10)
    assert storage.pages[hashes[7]] != b"torn"


def test_only_the_leading_pages_that_exist_are_read(storage):
    tokens = prompt(20)
    store(storage, tokens)
    hashes = page_hashes(tokens, PAGE)
    del storage.pages[hashes[5]]
    read = []
    storage.before["get"] = read.append
    with open_engine(storage) as engine:
        assert engine.prefill(tokens).pages(Source.L3) == 5
    assert read == hashes[:5]


def test_a_gap_in_one_batch_ends_the_lookup_of_all(storage):
    tokens = prompt(BATCH_PAGES + 40)
    store(storage, tokens)
    hashes = page_hashes(tokens, PAGE)
    del storage.pages[hashes[100]]
    read = []
    storage.before["get"] = read.append
    with open_engine(storage, pages=200) as engine:
        assert engine.prefill(tokens).pages(Source.L3) == 100
    assert read == hashes[:100]


def test_calls_have_at_most_128_pages(storage, monkeypatch):
    sizes = []

    def watch(method):
        original = getattr(storage, method)

        def watched(keys, *pages):
            sizes.append(len(keys))
            return original(keys, *pages)

        monkeypatch.setattr(storage, method, watched)

    for method in ("batch_exists", "batch_get_into", "batch_set_from"):
        watch(method)
    tokens = prompt(BATCH_PAGES * 2 + 3)
    store(storage, tokens)
    with open_engine(storage, pages=300) as engine:
        assert engine.prefill(tokens).pages(Source.L3) == BATCH_PAGES * 2 + 3
    assert set(sizes) == {128, 3}


def test_too_few_tokens_are_not_worth_a_prefetch(storage):
    store(storage, prompt(20))
    asked = []
    storage.before["exists"] = asked.append
    with open_engine(storage, prefetch_threshold=256) as engine:
        assert engine.prefill(prompt(20)).pages(Source.L3) == 0
    assert asked == []


def test_too_few_hits_are_not_worth_a_read(storage):
    store(storage, prompt(3))
    with open_engine(storage, prefetch_threshold=4 * PAGE) as engine:
        assert engine.prefill(prompt(20)).pages(Source.L3) == 0


def test_a_request_that_waits_keeps_its_place_while_others_run(storage):
    store(storage, prompt(20))
    with open_engine(storage, pages=24) as engine:
        waiting = engine.prefetch(prompt(20))
        for salt in range(1, 6):
            assert engine.prefill(prompt(20, salt)).wrong_bytes == 0
        report = engine.prefill(prompt(20), waiting)
        assert report.pages(Source.L3) == 20
        assert report.wrong_bytes == 0


def test_pages_that_another_request_computed_meanwhile_are_not_taken_twice(storage):
    store(storage, prompt(20))
    with open_engine(storage) as engine:
        waiting = engine.prefetch(prompt(20))
        assert waiting.operation.done.wait(10)
        engine.prefill(prompt(20))
        report = engine.prefill(prompt(20), waiting)
        assert report.pages(Source.L1) == 20
        assert engine.wait_for_backup(10)
        assert engine.stats.l2_resident == 20


def test_a_prefetch_is_good_for_one_request_and_for_its_own(storage):
    with open_engine(storage) as engine:
        waiting = engine.prefetch(prompt(2))
        with pytest.raises(ValueError, match="other tokens"):
            engine.prefill(prompt(3), waiting)
        engine.prefill(prompt(2), waiting)
        with pytest.raises(ValueError, match="used or cancelled"):
            engine.prefill(prompt(2), waiting)
        with pytest.raises(ValueError, match="used or cancelled"):
            engine.cancel(waiting)


def test_waiting_requests_hold_no_more_than_their_share_of_l2(storage, gate):
    """SGLang's limit: 0.8 of what L2 has beyond L1, which is 32 pages here."""
    for salt in range(4):
        store(storage, prompt(20, salt))
    storage.before["exists"] = gate
    with open_engine(storage) as engine:
        first, second, third = (engine.prefetch(prompt(20, salt)) for salt in range(3))
        assert None not in (first.operation, second.operation)  # 0 and 20 pages are less than 25.6
        assert third.operation is None
        assert engine.stats.prefetch_limited == 20
        gate.opened.set()
        engine.cancel(first)
        assert engine.prefetch(prompt(20, 3)).operation is not None


def test_a_request_that_was_held_back_asks_again_when_it_runs(storage):
    for salt in range(3):
        store(storage, prompt(20, salt))
    with open_engine(storage) as engine:
        waiting = [(salt, engine.prefetch(prompt(20, salt))) for salt in range(3)]
        reports = [engine.prefill(prompt(20, salt), prefetch) for salt, prefetch in waiting]
        assert engine.stats.prefetch_limited == 20
    assert [report.pages(Source.L3) for report in reports] == [20, 20, 20]
    assert sum(report.wrong_bytes for report in reports) == 0


def test_a_policy_that_is_unknown_names_the_choices():
    with pytest.raises(SettingsError, match="none of: best_effort, wait_complete, timeout"):
        PrefetchPolicy("eager")
    with pytest.raises(SettingsError, match="not negative"):
        PrefetchPolicy(timeout_base=-1)


def test_stopping_an_operation_shares_out_its_slots():
    operation = PrefetchOperation(list("abcdef"), [], [10, 11, 12, 13, 14, 15])
    assert operation.begin(slice(0, 2))
    assert operation.end(slice(0, 2), [KV, KV]) == []
    assert operation.begin(slice(2, 4))
    assert operation.stop() == ([KV, KV], [14, 15], True)
    assert operation.end(slice(2, 4), [KV, KV]) == [12, 13]
    assert not operation.begin(slice(4, 6))


def test_a_status_that_is_only_truthy_is_no_page(storage, monkeypatch):
    """SGLang's v1 calls take any truthy answer for success; a negative errno is one."""
    store(storage, prompt(20))
    monkeypatch.setattr(storage, "batch_get_into", lambda keys, pages: [-5] * len(keys))
    with open_engine(storage) as engine:
        report = engine.prefill(prompt(20))
        assert report.pages(Source.RECOMPUTED) == 20
        assert report.wrong_bytes == 0
