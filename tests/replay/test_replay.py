"""Replays against a brute-force bound, and what they leave on paper."""

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import Capabilities, HiCacheStorage, Namespace
from hicache_storage.engine import KVShape, Source, TierEngine
from hicache_storage.replay.bound import UpperBound
from hicache_storage.replay.parquet import write_rows
from hicache_storage.replay.replay import Summary, replay
from hicache_storage.replay.request import Request
from hicache_storage.replay.workload import Workload

PAGE = 8


class MemoryStorage(HiCacheStorage):
    capabilities = Capabilities(delete=True)

    def __init__(self):
        super().__init__(None, Namespace())
        self.pages = {}

    def get(self, key):
        return self.pages.get(key)

    def exists(self, key):
        return key in self.pages

    def set(self, key, value):
        self.pages[key] = bytes(value)


def open_engine(storage, pages=64, **options):
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": PAGE, "backup_wait": 60.0, **options}
    return TierEngine(
        KVShape.parse("mha:1x1x4:bf16"), PAGE, l1_tokens=pages * PAGE, storage=storage, **options
    )


def brute_force_hits(prompts, page_size):
    """Tokens of whole pages that some earlier prompt began with, too."""
    hits = []
    for index, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:index]:
            shared = 0
            while shared < min(len(prompt), len(earlier)) and prompt[shared] == earlier[shared]:
                shared += 1
            cached = len(earlier) // page_size * page_size
            best = max(best, min(shared, cached) // page_size * page_size)
        hits.append(best)
    return hits


@given(st.lists(st.lists(st.integers(0, 1), max_size=14), max_size=12), st.integers(1, 5))
def test_the_bound_is_what_brute_force_says(prompts, page_size):
    bound = UpperBound(page_size)
    assert [bound.add(prompt) for prompt in prompts] == brute_force_hits(prompts, page_size)


segments = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([5, 8, 16])), min_size=1, max_size=5)


@settings(max_examples=30, deadline=None)
@given(st.lists(segments, min_size=1, max_size=25))
def test_with_an_unlimited_l3_the_hit_rate_is_the_bound(streams):
    requests = [Request(0, tuple(stream)) for stream in streams]
    with open_engine(MemoryStorage(), pages=10) as engine:
        for row in replay(engine, requests):
            assert row.report.hit_tokens == row.bound_tokens
            assert row.report.wrong_bytes == 0


@pytest.fixture(scope="module")
def replayed():
    with open_engine(MemoryStorage(), pages=1024) as engine:
        return list(replay(engine, Workload(requests=300)))


def test_the_workload_reaches_the_bound_and_uses_every_tier(replayed):
    summary = Summary()
    for row in replayed:
        summary.add(row)
    assert summary.requests == 300
    assert summary.hit_tokens == summary.bound_tokens
    assert summary.hit_rate == summary.bound > 0.5
    assert summary.wrong_bytes == 0
    assert min(summary.pages.values()) > 100
    assert sum(summary.tokens_from.values()) == summary.tokens


def test_rows_are_kept_as_parquet(replayed, tmp_path):
    path = tmp_path / "rows.parquet"
    write_rows(replayed, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.parquet"]
    rows = pq.read_table(path).to_pylist()
    assert len(rows) == len(replayed)
    for row, kept in zip(replayed, rows, strict=True):
        assert kept["request"] == row.index
        assert kept["arrival_ms"] == row.arrival_ms
        assert kept["bound_tokens"] == row.bound_tokens
        assert kept["wrong_bytes"] == 0
        for source in Source:
            name = source.value.lower()
            assert kept[f"{name}_tokens"] == row.report.tokens_from(source)
            assert kept[f"{name}_bytes"] == row.report.nbytes(source)
            assert kept[f"{name}_seconds"] == row.report.seconds[source]
        assert kept["tokens"] == sum(kept[f"{source.value.lower()}_tokens"] for source in Source)


def test_an_interrupted_replay_has_rows_with_the_bound_so_far(tmp_path):
    write_rows([], tmp_path / "none.parquet")
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0


def test_requests_that_wait_are_prefetched_and_nothing_is_wrong():
    with open_engine(MemoryStorage(), pages=1024, prefetch_policy="best_effort") as engine:
        rows = list(replay(engine, Workload(requests=200), queue=3))
        assert [row.index for row in rows] == list(range(200))
        assert sum(row.report.wrong_bytes for row in rows) == 0
        assert all(row.report.hit_tokens <= row.bound_tokens for row in rows)
        assert sum(row.report.pages(Source.L3) for row in rows) > 0
