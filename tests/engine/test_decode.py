"""PD disaggregation in miniature: the next turn's prefill finds what the decode engine generated."""

import subprocess
import sys

import pytest

from hicache_storage import CapacityError, ClosedError, SettingsError, open_storage
from hicache_storage.engine import DecodeEngine, KVShape, Source, TierEngine, page_hashes

SHAPE = KVShape.parse("mha:2x2x8:bf16")
PAGE = 4
PROMPT = list(range(100, 110))
"""Two pages and a half."""
ANSWER = list(range(500, 517))


def decode_engine(storage, pages=12, **options):
    return DecodeEngine(SHAPE, PAGE, l1_tokens=pages * PAGE, storage=storage, **options)


def prefill_engine(storage, **options):
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": PAGE, **options}
    return TierEngine(SHAPE, PAGE, l1_tokens=64 * PAGE, storage=storage, **options)


def decode(engine, prompt, answer):
    request = engine.begin(prompt)
    for token in answer:
        engine.generate(request, token)
    engine.finish(request)


def test_the_next_turn_finds_the_answer_of_the_last_one_in_l3(storage):
    with prefill_engine(storage) as prefill, decode_engine(storage) as engine:
        prefill.prefill(PROMPT)
        decode(engine, PROMPT, ANSWER)
        assert prefill.wait_for_backup(10)
        assert engine.wait_for_backup(10)
        report = prefill.prefill(PROMPT + ANSWER + [7] * 9)
        # 26 of the 27 tokens have KV: 6 pages, 2 of the prompt and 4 with the answer
        assert report.sources == (Source.L1,) * 2 + (Source.L3,) * 4 + (Source.RECOMPUTED,) * 3
        assert report.wrong_bytes == 0


def test_decode_writes_what_it_generated_and_not_the_prompt(storage):
    with decode_engine(storage) as engine:
        decode(engine, PROMPT, ANSWER)
        assert engine.wait_for_backup(10)
    assert set(storage.pages) == set(page_hashes(PROMPT + ANSWER, PAGE)[2:6])


def test_a_page_goes_to_l3_when_its_last_token_has_been_fed_in(storage):
    with decode_engine(storage) as engine:
        request = engine.begin(PROMPT)
        sent = [engine.generate(request, token) for token in ANSWER]
        # tokens 10 and 11 fill the third page, and the KV of 11 comes when it is fed in for 12
        assert sent == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0]


def test_with_a_stride_pages_go_together(storage):
    with decode_engine(storage, offload_stride=2 * PAGE + 1) as engine:
        request = engine.begin(PROMPT)
        sent = [engine.generate(request, token) for token in ANSWER[:-1]]
        assert [count for count in sent if count] == [2, 2]
        engine.generate(request, ANSWER[-1])
        for token in range(4):
            engine.generate(request, token)
        assert engine.finish(request) == 1  # what is complete does not wait for the stride to be full


def test_l2_is_a_passage_and_l1_is_free_when_the_request_is_finished(storage):
    with decode_engine(storage, pages=7) as engine:
        for turn in range(10):
            decode(engine, PROMPT, [turn * 100 + token for token in ANSWER])
            assert engine.wait_for_backup(10)
        stats = engine.stats
    assert (stats.l1_resident, stats.l2_resident) == (0, 0)
    assert stats.offloaded == stats.backed_up == 40
    assert stats.lost == stats.backup_failed == 0


def test_pages_wait_in_l1_while_l2_is_full(storage, gate):
    storage.before["set"] = gate
    with decode_engine(storage, pages=4, hicache_ratio=1.3) as engine:  # 5 pages of L2
        first = engine.begin([1])
        for token in range(3 * PAGE + 1):
            engine.generate(first, token)
        engine.finish(first)
        second = engine.begin([2])
        sent = sum(engine.generate(second, token) for token in range(3 * PAGE + 1))
        assert sent == 2
        gate.opened.set()
        assert engine.wait_for_backup(10)
        assert engine.finish(second) == 1
        assert engine.wait_for_backup(10)
        assert engine.stats.lost == 0
    assert len(storage.pages) == 6


def test_a_storage_that_does_not_answer_costs_pages_and_holds_up_nobody(storage, gate):
    storage.before["set"] = gate
    with decode_engine(storage, pages=4, hicache_ratio=1.3) as engine:
        for turn in range(5):
            decode(engine, [turn], range(3 * PAGE + 1))
        assert not engine.wait_for_backup(0.01)
        stats = engine.stats
        assert stats.lost == 15 - 5
        assert (stats.l1_resident, stats.l2_resident) == (0, 5)
        gate.opened.set()


def test_a_storage_that_fails_is_counted_and_costs_no_slots(storage):
    def fail(_key):
        raise RuntimeError("no")

    storage.before["set"] = fail
    with decode_engine(storage) as engine:
        decode(engine, PROMPT, ANSWER)
        assert engine.wait_for_backup(10)
        assert engine.stats.backup_failed == 4
        assert engine.stats.l2_resident == 0


def test_l1_that_is_full_refuses_the_next_token_and_the_request_goes_on_later(storage):
    with decode_engine(storage, pages=4) as engine:
        one = engine.begin(list(range(8)))
        other = engine.begin(list(range(50, 58)))
        with pytest.raises(CapacityError, match="finish a request first"):
            engine.generate(one, 1)
        with pytest.raises(CapacityError):
            engine.begin([3])
        engine.finish(other)
        for token in range(6):
            engine.generate(one, token)
        engine.finish(one)
        assert engine.wait_for_backup(10)
    assert set(storage.pages) == set(page_hashes([*range(8), *range(4)], PAGE)[2:])


@pytest.mark.parametrize("mistake", ["empty", "negative", "finished", "stride"])
def test_a_mistake_is_a_clear_error(storage, mistake):
    with decode_engine(storage) as engine:
        request = engine.begin(PROMPT)
        if mistake == "empty":
            with pytest.raises(ValueError, match="empty prompt"):
                engine.begin([])
        elif mistake == "negative":
            with pytest.raises(ValueError, match="token ids are integers from 0"):
                engine.generate(request, -1)
            assert list(request.tokens) == PROMPT
        elif mistake == "finished":
            engine.finish(request)
            for call in (engine.finish, lambda old: engine.generate(old, 1)):
                with pytest.raises(ValueError, match="has finished"):
                    call(request)
        else:
            with pytest.raises(SettingsError, match="offload_stride"):
                decode_engine(storage, offload_stride=0)


@pytest.mark.usefixtures("no_leaks")
def test_a_closed_decode_engine_leaves_nothing_behind(storage, gate):
    storage.before["set"] = gate
    engine = decode_engine(storage)
    request = engine.begin(PROMPT)
    decode(engine, PROMPT, ANSWER)
    gate.opened.set()
    engine.close()
    engine.close()
    assert storage.registered == []
    for call in (lambda: engine.begin(PROMPT), lambda: engine.finish(request), engine.wait_for_backup):
        with pytest.raises(ClosedError):
            call()


DECODE_IN_ANOTHER_PROCESS = """
import sys
from hicache_storage import open_storage
from hicache_storage.engine import DecodeEngine, KVShape

root, layout, io_backend = sys.argv[1:]
shape = KVShape.parse("mha:2x2x8:bf16")
namespace = shape.namespace(4, layout)
with (
    open_storage("hicache_storage_file:FileStorage", {"root": root}, namespace) as storage,
    DecodeEngine(
        shape, 4, l1_tokens=48, storage=storage, mem_layout=layout, io_backend=io_backend
    ) as engine,
):
    request = engine.begin(range(100, 110))
    for token in range(500, 517):
        engine.generate(request, token)
    engine.finish(request)
    assert engine.wait_for_backup(30)
"""


@pytest.mark.parametrize(
    ("layout", "io_backend"),
    [
        ("layer_first", "direct"),
        ("page_first", "kernel"),
        ("page_first_direct", "direct"),
        ("page_head", "kernel"),
    ],
)
def test_prefill_and_decode_in_two_processes_share_pages_through_files(tmp_path, layout, io_backend):
    subprocess.run(
        [sys.executable, "-c", DECODE_IN_ANOTHER_PROCESS, str(tmp_path), layout, io_backend],
        check=True,
        timeout=60,
    )
    namespace = SHAPE.namespace(PAGE, layout)
    with (
        open_storage("hicache_storage_file:FileStorage", {"root": str(tmp_path)}, namespace) as storage,
        prefill_engine(storage, mem_layout=layout, io_backend=io_backend) as engine,
    ):
        engine.prefill(PROMPT)  # the prompt is the prefill engine's
        report = engine.prefill(PROMPT + ANSWER)
        assert report.sources == (Source.L1,) * 2 + (Source.L3,) * 4
        assert report.wrong_bytes == 0
