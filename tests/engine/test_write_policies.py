"""Write policies: when a page goes down to L2, and what is lost when it does not."""

import pytest

from hicache_storage.engine import KVShape, Source, TierEngine, page_hashes
from hicache_storage.engine.radix import Tier

SHAPE = KVShape.parse("mha:2x2x8:bf16")
PAGE = 4


def open_engine(storage, write_policy, pages=12, **options):
    options = {"prefetch_policy": "wait_complete", "prefetch_threshold": PAGE, "backup_wait": 10.0, **options}
    return TierEngine(
        SHAPE, PAGE, l1_tokens=pages * PAGE, write_policy=write_policy, storage=storage, **options
    )


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def in_l2(engine):
    """Salts and pages that L2 has, told by their hashes."""
    return {node.page_hash for node in engine._tiers.tree.nodes() if node.slots[Tier.L2] is not None}


def test_write_through_copies_a_page_when_it_was_computed(storage):
    with open_engine(storage, "write_through") as engine:
        engine.prefill(prompt(3))
        assert in_l2(engine) == set(page_hashes(prompt(3), PAGE))
        assert engine.wait_for_backup(10)
    assert len(storage.pages) == 3


def test_write_through_selective_copies_a_page_when_it_is_used_again(storage):
    with open_engine(storage, "write_through_selective") as engine:
        engine.prefill(prompt(3))
        assert engine.wait_for_backup(10)
        assert in_l2(engine) == set(storage.pages) == set()
        engine.prefill(prompt(2) + prompt(1, salt=1))
        assert engine.wait_for_backup(10)
        assert in_l2(engine) == set(storage.pages) == set(page_hashes(prompt(2), PAGE))


def test_write_through_selective_forgets_what_l1_lets_go_of_before(storage):
    with open_engine(storage, "write_through_selective") as engine:
        engine.prefill(prompt(3))
        engine.flush_l1()
        assert engine.stats.forgotten == 3
        assert engine.stats.dropped == 0  # not lost under pressure: it was not wanted
        assert engine.prefill(prompt(3)).pages(Source.RECOMPUTED) == 3


def test_write_back_copies_a_page_when_l1_lets_go_of_it(storage):
    with open_engine(storage, "write_back") as engine:
        for _ in range(3):
            engine.prefill(prompt(3))
        assert engine.wait_for_backup(10)
        assert in_l2(engine) == set(storage.pages) == set()
        assert engine.flush_l1() == 3
        assert engine.wait_for_backup(10)
        assert in_l2(engine) == set(storage.pages) == set(page_hashes(prompt(3), PAGE))
        report = engine.prefill(prompt(3))
        assert report.sources == (Source.L2,) * 3
        assert report.wrong_bytes == 0


def test_write_back_copies_a_page_with_the_pages_before_it(storage):
    """Alone it would be out of reach for whoever looks for it in L2 or L3."""
    with open_engine(storage, "write_back") as engine:
        engine.prefill(prompt(6))
        engine.prefill(prompt(8, salt=1))  # needs the room of two pages
        assert engine.wait_for_backup(10)
        assert engine.stats.l1_evicted == 2
        assert in_l2(engine) == set(storage.pages) == set(page_hashes(prompt(6), PAGE))
        assert engine.prefill(prompt(6)).sources == (Source.L1,) * 4 + (Source.L2,) * 2


def test_write_back_copies_each_page_once(storage):
    with open_engine(storage, "write_back") as engine:
        for turn in range(6):
            engine.prefill(prompt(6, salt=turn % 2))
            engine.flush_l1()
        assert engine.stats.copied_to_l2 == 12


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_page_from_l3_is_not_written_there_again(storage, policy):
    with open_engine(storage, policy) as engine:
        for _ in range(2):
            engine.prefill(prompt(5))
        engine.flush_l1()
        assert engine.wait_for_backup(10)
    written = []
    storage.before["set"] = written.append
    with open_engine(storage, policy) as engine:
        for _ in range(3):
            assert engine.prefill(prompt(5)).wrong_bytes == 0
            engine.flush_l1()
        assert engine.stats.prefetched == 5
        assert engine.wait_for_backup(10)
    assert written == []


@pytest.mark.parametrize("policy", ["write_through_selective", "write_back"])
def test_pages_from_l3_bring_down_the_pages_before_them(storage, policy):
    """L2 has no holes: a fetched page needs its prefix there."""
    with open_engine(storage, "write_through") as engine:
        engine.prefill(prompt(6))
        assert engine.wait_for_backup(10)
    hashes = page_hashes(prompt(6), PAGE)
    for page_hash in hashes[:2]:
        del storage.pages[page_hash]
    with open_engine(storage, policy) as engine:
        engine.prefill(prompt(2))
        assert in_l2(engine) == set()
        assert engine.prefill(prompt(6)).sources == (Source.L1,) * 2 + (Source.L3,) * 4
        assert in_l2(engine) == set(hashes)


def test_write_back_goes_on_when_l2_has_no_room(storage, gate):
    """L2 is full of pages that the storage does not take; L1 lets go of its pages all the same."""
    storage.before["set"] = gate
    with open_engine(storage, "write_back", hicache_ratio=1.1, backup_wait=0.01) as engine:
        for salt in range(4):
            assert engine.prefill(prompt(12, salt)).wrong_bytes == 0
        assert engine.stats.dropped >= 12
        assert engine.stats.forgotten >= 12
        gate.opened.set()
        storage.before.clear()
        assert engine.wait_for_backup(10)
        assert engine.prefill(prompt(12, 9)).wrong_bytes == 0


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_a_page_that_left_l2_and_was_computed_again_leaves_both_tiers_after_its_children(policy):
    """The order of events that SGLang's issue 19212 crashed at: a parent taken for a leaf of L2."""
    with open_engine(None, policy) as engine:
        for _ in range(2):
            engine.prefill(prompt(3))
        engine.flush_l1()
        leaf, slot = engine._tiers.tree.evict(Tier.L2)
        engine._tiers.l2.free([slot])
        assert leaf.page_hash == page_hashes(prompt(3), PAGE)[2]
        assert engine.prefill(prompt(3)).sources == (Source.L2, Source.L2, Source.RECOMPUTED)
        engine.prefill(prompt(3))
        order = []
        while evicted := engine._tiers.tree.evict(Tier.L2):
            order.append(evicted[0].page_hash)
            engine._tiers.l2.free([evicted[1]])
        known = 2 if policy == "write_back" else 3  # the leaf has not left L1
        assert order == page_hashes(prompt(3), PAGE)[:known][::-1]
        assert engine.flush_l1() == 3
        assert engine.prefill(prompt(3)).wrong_bytes == 0
