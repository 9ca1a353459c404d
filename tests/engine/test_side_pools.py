"""Hybrid models: a page is there when all of its pools are, and nothing else is ever served."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import SettingsError, open_storage
from hicache_storage.engine import KVShape, TierEngine, page_hashes
from hicache_storage.engine.side_pools import SidePool
from hicache_storage.hybrid import HitPolicy

SHAPE = KVShape.parse("mha:4x4x8:bf16")
PAGE = 4
MAMBA = SidePool.mamba(KVShape.parse("mha:3x4x24:fp32"))
SWA = SidePool.swa(KVShape.parse("mha:2x4x8:bf16"), window=2)
INDEXER = SidePool.indexer(KVShape.parse("mla:4x13:fp8_e4m3"))
HYBRIDS = {"mamba": [MAMBA], "swa": [SWA], "indexer": [INDEXER], "all": [MAMBA, SWA, INDEXER]}


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def open_engine(storage, pools, pages=12, **options):
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": PAGE, **options}
    return TierEngine(SHAPE, PAGE, l1_tokens=pages * PAGE, storage=storage, side_pools=pools, **options)


def sources(report):
    assert report.wrong_bytes == 0
    return [source.value for source in report.sources]


def forget(engine):
    assert engine.wait_for_backup(60)
    engine.flush_l1()
    engine.flush_l2()


def names(storage, tokens, page, pool=""):
    """The names in L3 of what a pool has of a page; KV's without a pool."""
    page_hash = page_hashes(tokens, PAGE)[page]
    return [name for name in storage.pages if name.startswith(f"{page_hash}.{pool}" if pool else page_hash)]


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct", "page_first", "page_head"])
@pytest.mark.parametrize("hybrid", HYBRIDS)
def test_a_hybrid_comes_back_from_every_tier_of_a_real_store(tmp_path, hybrid, layout):
    namespace = SHAPE.namespace(PAGE, layout, model="m")
    io_backend = "kernel" if layout in ("page_first", "page_head") else "direct"
    with (
        open_storage("file", {"root": str(tmp_path)}, namespace) as store,
        open_engine(store, HYBRIDS[hybrid], mem_layout=layout, io_backend=io_backend) as engine,
    ):
        assert sources(engine.prefill(prompt(10))) == ["recomputed"] * 10
        assert sources(engine.prefill(prompt(10))) == ["L1"] * 10
        engine.flush_l1()
        assert sources(engine.prefill(prompt(10))) == ["L2"] * 10
        forget(engine)
        assert sources(engine.prefill(prompt(12))) == ["L3"] * 10 + ["recomputed"] * 2


def test_each_pool_stores_what_its_policy_asks_for(storage):
    with open_engine(storage, HYBRIDS["all"]) as engine:
        engine.prefill(prompt(10))
        assert engine.wait_for_backup(30)
    stored = {
        pool.name: [page for page in range(10) if names(storage, prompt(10), page, pool.name)]
        for pool in HYBRIDS["all"]
    }
    assert stored == {"mamba": [9], "swa": [8, 9], "indexer": list(range(10))}
    assert len(storage.pages) == 10 + 1 + 2 + 10


@pytest.mark.parametrize("harm", ["lost", "unreadable"])
@pytest.mark.parametrize(
    ("hybrid", "page", "left"),
    [("mamba", 9, 6), ("swa", 8, 6), ("swa", 9, 6), ("indexer", 7, 7), ("all", 9, 6), ("mamba", 5, 10)],
)
def test_a_side_page_that_cannot_be_had_leaves_the_longest_prefix_that_has_all_of_its_own(
    storage, hybrid, page, left, harm
):
    """Requests ended at 6 and at 10 pages, and there are states and windows there."""
    with open_engine(storage, HYBRIDS[hybrid]) as engine:
        engine.prefill(prompt(6))
        engine.prefill(prompt(10))
        forget(engine)
        (name,) = names(storage, prompt(10), page, HYBRIDS[hybrid][0].name)
        storage.pages[name] = b"cut"
        if harm == "lost":
            del storage.pages[name]
        assert sources(engine.prefill(prompt(10))) == ["L3"] * left + ["recomputed"] * (10 - left)
        forget(engine)
        assert sources(engine.prefill(prompt(10))) == ["L3"] * 10  # and the loss is healed


def test_kv_without_a_state_at_its_end_is_computed_again_and_gets_one(storage):
    """Another request went on from these pages: their KV is in L1, and no state ends there."""
    with open_engine(storage, [MAMBA]) as engine:
        engine.prefill(prompt(10))
        assert sources(engine.prefill(prompt(6))) == ["recomputed"] * 6
        assert sources(engine.prefill(prompt(6))) == ["L1"] * 6
        engine.flush_l1()
        assert sources(engine.prefill(prompt(6))) == ["L2"] * 6
        forget(engine)
        assert sources(engine.prefill(prompt(6))) == ["L3"] * 6
        assert engine.stats.l2_resident == 6


def test_a_state_that_l2_lacks_comes_from_l3_to_the_page_that_is_there(storage):
    with open_engine(storage, [MAMBA]) as engine:
        engine.prefill(prompt(6))
        forget(engine)
        state = {name: storage.pages.pop(name) for name in names(storage, prompt(6), 5, "mamba")}
        engine.prefill(prompt(10))
        assert engine.wait_for_backup(30)
        storage.pages.update(state)
        assert sources(engine.prefill(prompt(6))) == ["L3"] * 6
        assert engine.stats.l2_resident == 10
        engine.flush_l1()
        assert sources(engine.prefill(prompt(6))) == ["L2"] * 6


@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_a_state_that_was_added_to_a_page_goes_down_with_it(storage, write_policy):
    with open_engine(storage, [MAMBA], write_policy=write_policy) as engine:
        for _ in range(2):
            engine.prefill(prompt(10))
            engine.prefill(prompt(6))
        engine.flush_l1()
        forget(engine)
        assert sources(engine.prefill(prompt(6))) == ["L3"] * 6
        assert sources(engine.prefill(prompt(10)))[-4:] == ["L3"] * 4


def test_a_state_that_is_added_while_its_page_is_on_the_way_to_l3_follows_it(storage, gate):
    storage.before["set"] = gate
    with open_engine(storage, [MAMBA]) as engine:
        engine.prefill(prompt(10))
        assert gate.reached.wait(30)
        engine.prefill(prompt(6))
        gate.opened.set()
        forget(engine)
        assert sources(engine.prefill(prompt(6))) == ["L3"] * 6


def test_one_flipped_byte_of_a_state_is_seen(storage):
    with open_engine(storage, [MAMBA]) as engine:
        engine.prefill(prompt(6))
        forget(engine)
        (name,) = names(storage, prompt(6), 5, "mamba")
        content = bytearray(storage.pages[name])
        content[9] ^= 0x10
        storage.pages[name] = bytes(content)
        assert engine.prefill(prompt(6)).wrong_bytes == 1


def test_pools_of_one_shape_cannot_stand_in_for_each_other(storage):
    twins = [SidePool("left", SHAPE, HitPolicy.ALL_PAGES), SidePool("right", SHAPE, HitPolicy.ALL_PAGES)]
    with open_engine(storage, twins) as engine:
        engine.prefill(prompt(1))
        forget(engine)
        (left,), (right,) = (names(storage, prompt(1), 0, pool.name) for pool in twins)
        kv = page_hashes(prompt(1), PAGE)[0]
        assert len({storage.pages[left], storage.pages[right], storage.pages[kv]}) == 3
        storage.pages[left], storage.pages[right] = storage.pages[right], storage.pages[left]
        assert engine.prefill(prompt(1)).wrong_bytes > engine.page_nbytes


def longest_restorable(pages, kv, pools):
    """By brute force: the greatest length for which every pool has all that it needs."""
    return max(
        length
        for length in range(pages + 1)
        if all(page in kv for page in range(length))
        and all(
            page in have
            for pool, have in pools
            for page in (
                range(length)
                if pool.policy is HitPolicy.ALL_PAGES
                else range(max(0, length - pool.window), length)
            )
        )
    )


@settings(max_examples=60, deadline=None)
@given(
    ends=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    loss=st.sampled_from([0.05, 0.2, 0.5]),
    hybrid=st.sampled_from(sorted(HYBRIDS)),
    is_lost=st.booleans(),
)
def test_after_any_loss_the_hit_is_the_longest_prefix_that_brute_force_finds(
    new_storage, ends, seed, loss, hybrid, is_lost
):
    storage, pools = new_storage(), HYBRIDS[hybrid]
    with open_engine(storage, pools) as engine:
        for end in ends:
            engine.prefill(prompt(end))
        forget(engine)
        rng = random.Random(seed)
        for name in sorted(storage.pages):
            if rng.random() < loss:
                if is_lost:
                    del storage.pages[name]
                else:
                    storage.pages[name] = b"cut"
        good = {name for name, page in storage.pages.items() if page != b"cut"}
        present = {
            pool: {
                page
                for page in range(12)
                if any(name in good for name in names(storage, prompt(12), page, pool))
            }
            for pool in [pool.name for pool in pools]
        }
        kv = {page for page, name in enumerate(page_hashes(prompt(12), PAGE)) if name in good}
        expected = longest_restorable(12, kv, [(pool, present[pool.name]) for pool in pools])
        assert sources(engine.prefill(prompt(12))) == ["L3"] * expected + ["recomputed"] * (12 - expected)


@pytest.mark.parametrize("hybrid", HYBRIDS)
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
def test_a_crowd_of_requests_never_gets_a_wrong_byte(storage, hybrid, write_policy):
    rng = random.Random(1)
    found = set()
    with open_engine(storage, HYBRIDS[hybrid], write_policy=write_policy) as engine:
        for _ in range(150):
            tokens = [token for _ in range(rng.randint(1, 5)) for token in prompt(2, salt=rng.randrange(3))]
            found.update(sources(engine.prefill(tokens)))
            if rng.random() < 0.1:
                forget(engine)
                for name in rng.sample(sorted(storage.pages), len(storage.pages) // 8):
                    del storage.pages[name]
    assert found == {"L1", "L2", "L3", "recomputed"}


@pytest.mark.parametrize("shape", ["mha:4x4x8:bf16", "mla:4x64:bf16"])
@pytest.mark.parametrize("loser", [0, 1])
def test_a_state_that_one_rank_lost_shortens_the_prefix_of_all(open_team, storage, shape, loser):
    """States are cut among ranks even where KV is alike on all of them."""
    storages = [storage, storage] if shape.startswith("mla") else None
    team = open_team(shape, storages, tp=2, side_pools=[MAMBA])
    team.prefill(prompt(6))
    team.prefill(prompt(10))
    team.forget()
    assert team.prefill(prompt(10)) == [["L3"] * 10] * 2
    team.forget()
    suffix = team.engines[loser]._tiers.sides.parts(storage)[0].suffix
    del team.storages[loser].pages[page_hashes(prompt(10), PAGE)[9] + suffix]
    assert team.prefill(prompt(10)) == [["L3"] * 6 + ["recomputed"] * 4] * 2


def test_ranks_agree_on_a_prefix_that_each_of_them_has_a_state_for(open_team):
    """Rank 0 has states at 4 and 8 pages, rank 1 at 4 and 6: the least of 8 and 6 would be wrong."""
    team = open_team("mha:4x4x8:bf16", tp=2, side_pools=[MAMBA])
    for end in (4, 6, 8):
        team.prefill(prompt(end))
    team.forget()
    for rank, lost in enumerate([5, 7]):
        for name in names(team.storages[rank], prompt(8), lost, "mamba"):
            del team.storages[rank].pages[name]
    assert team.prefill(prompt(8)) == [["L3"] * 4 + ["recomputed"] * 4] * 2


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"name": "a/b"}, "letters, digits"),
        ({"window": 0}, "at least one page"),
        ({"policy": HitPolicy.BLOCK_GROUPS}, "no block groups"),
    ],
)
def test_a_pool_that_makes_no_sense_says_why(fields, complaint):
    with pytest.raises(SettingsError, match=complaint):
        SidePool(**{"name": "x", "shape": SHAPE, "policy": HitPolicy.ALL_PAGES, **fields})


def test_two_pools_of_one_name_are_refused(storage):
    with pytest.raises(SettingsError, match="two side pools have one name: mamba, mamba"):
        open_engine(storage, [MAMBA, MAMBA])
    assert storage.registered == []


@pytest.mark.usefixtures("no_leaks")
def test_every_pool_is_registered_with_the_storage_and_let_go_of(storage):
    with open_engine(storage, HYBRIDS["all"]) as engine:
        assert len(storage.registered) == 4
        engine.prefill(prompt(3))
    assert storage.registered == []
