"""Ranks: each with a tree, an L2 and a storage of its own, and all with the same prefix."""

import random
import threading

import pytest
import torch

from hicache_storage import SettingsError, UnavailableError
from hicache_storage.engine import KVShape, TierEngine, page_hashes
from hicache_storage.engine.ranks import Asking, GlooRanks, Place, RanksError
from hicache_storage.engine.shard import Shard

MHA = "mha:4x4x8:bf16"
MLA = "mla:4x64:bf16"
PAGE = 4
GRIDS = [(MHA, 2, 1), (MHA, 1, 2), (MHA, 4, 1), (MHA, 2, 2), ("mha:5x2x8:bf16", 1, 3)]


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def key(tokens, page):
    return page_hashes(tokens, PAGE)[page]


@pytest.mark.parametrize(("shape", "tp", "pp"), GRIDS)
def test_every_rank_gets_its_own_pages_back_from_every_tier(open_team, shape, tp, pp):
    team = open_team(shape, tp=tp, pp=pp)
    assert team.prefill(prompt(10)) == [["recomputed"] * 10] * tp * pp
    assert team.prefill(prompt(10)) == [["L1"] * 10] * tp * pp
    team.each(lambda engine: engine.flush_l1())
    assert team.prefill(prompt(10)) == [["L2"] * 10] * tp * pp
    team.forget()
    assert team.prefill(prompt(10)) == [["L3"] * 10] * tp * pp
    assert [len(storage.pages) for storage in team.storages] == [10] * tp * pp


@pytest.mark.parametrize(("shape", "tp", "pp"), GRIDS)
def test_what_the_ranks_hold_is_what_one_rank_alone_would_hold(open_team, shape, tp, pp):
    with TierEngine(KVShape.parse(shape), PAGE, l1_tokens=12) as alone:
        alone.prefill(prompt(3))
        whole = contents(alone, prompt(3))
    team = open_team(shape, tp=tp, pp=pp)
    team.prefill(prompt(3))
    stages = [
        torch.cat([contents(engine, prompt(3)) for engine in team.engines[first : first + tp]], dim=4)
        for first in range(0, tp * pp, tp)
    ]
    assert torch.equal(torch.cat(stages, dim=2), whole)


def contents(engine, tokens):
    path = engine._tiers.tree.match(page_hashes(tokens, PAGE))
    return engine._tiers.l1.pages[[node.slots[0] for node in path]]


def test_pages_that_are_alike_on_all_ranks_are_written_by_one_and_read_by_all(open_team, storage):
    writers = []
    storage.before["set"] = lambda _key: writers.append(threading.current_thread())
    team = open_team(MLA, [storage] * 2, tp=2)
    team.prefill(prompt(10))
    team.forget()
    assert team.prefill(prompt(10)) == [["L3"] * 10] * 2
    assert len(writers) == 10
    assert len(set(writers)) == 1
    assert [engine.stats.backed_up for engine in team.engines] == [10, 0]
    assert [engine.stats.dropped for engine in team.engines] == [0, 0]


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("harm", ["lost", "unreadable"])
def test_a_page_that_one_rank_cannot_get_ends_the_prefix_on_all(open_team, loser, harm):
    """A lost page shows in the look-up, an unreadable one when the others have read theirs."""
    team = open_team(MHA, tp=2)
    team.prefill(prompt(10))
    team.forget()
    team.storages[loser].pages[key(prompt(10), 6)] = b"cut"
    if harm == "lost":
        del team.storages[loser].pages[key(prompt(10), 6)]
    assert team.prefill(prompt(10)) == [["L3"] * 6 + ["recomputed"] * 4] * 2
    assert team.prefill(prompt(10)) == [["L1"] * 10] * 2


@pytest.mark.parametrize("method", ["exists", "get"])
def test_a_storage_that_fails_on_one_rank_costs_all_their_hits_and_nothing_else(open_team, method):
    def fail(_key):
        raise UnavailableError("gone")

    team = open_team(MHA, tp=2)
    team.prefill(prompt(10))
    team.forget()
    team.storages[1].before[method] = fail
    assert team.hits(prompt(10)) == {0}
    team.forget()
    team.storages[1].before.clear()
    assert team.hits(prompt(10)) == {10}


@pytest.mark.parametrize("method", ["exists", "get"])
def test_a_storage_that_is_slow_on_one_rank_holds_up_no_rank_longer_than_its_patience(
    open_team, gate, method
):
    team = open_team(MHA, tp=2, prefetch_policy="timeout", prefetch_timeout_base=0.2)
    team.prefill(prompt(10))
    team.forget()
    team.storages[1].before[method] = gate
    assert team.hits(prompt(10)) == {0}
    gate.opened.set()
    team.storages[1].before.clear()
    assert team.hits(prompt(10)) == {10}


@pytest.mark.parametrize("forgetful", [0, 1])
def test_a_rank_that_has_forgotten_more_than_the_others_computes_with_them(open_team, forgetful):
    team = open_team(MHA, tp=2)
    team.prefill(prompt(10))
    team.forget()
    team.prefill(prompt(10))
    for storage in team.storages:
        storage.pages.clear()
    team.engines[forgetful].flush_l1()
    team.engines[forgetful].flush_l2()
    assert team.prefill(prompt(10)) == [["recomputed"] * 10] * 2
    assert team.prefill(prompt(10)) == [["L1"] * 10] * 2


def test_a_rank_that_has_forgotten_gets_its_pages_from_l3_while_the_others_use_theirs(open_team):
    team = open_team(MHA, tp=2)
    team.prefill(prompt(10))
    team.each(lambda engine: engine.wait_for_backup(60))
    team.engines[1].flush_l1()
    team.engines[1].flush_l2()
    assert team.prefill(prompt(10)) == [["L1"] * 10, ["L3"] * 10]


def test_a_rank_without_room_in_l2_keeps_the_others_from_fetching(open_team, gate):
    team = open_team(MHA, tp=2, backup_wait=0.0, hicache_ratio=1.1)
    team.prefill(prompt(10))
    team.forget()
    team.storages[1].before["set"] = gate
    assert team.hits(prompt(12, salt=1)) == {0}
    assert gate.reached.wait(30)
    assert team.hits(prompt(10)) <= {0, 1}  # rank 1 has 13 slots, 12 wait for their backup
    gate.opened.set()


def test_requests_that_wait_and_requests_that_give_up_keep_the_ranks_together(open_team):
    team = open_team(MHA, tp=2, prefetch_policy="best_effort", hicache_ratio=4.0)
    team.prefill(prompt(10))
    team.forget()

    def run(engine):
        given_up, waiting = engine.prefetch(prompt(10)), engine.prefetch(prompt(10))
        engine.cancel(given_up)
        waiting.operation.done.wait(30)
        return engine.prefill(prompt(10), waiting)

    reports = team.each(run)
    assert [report.hit_tokens for report in reports] == [10 * PAGE] * 2
    assert [report.wrong_bytes for report in reports] == [0, 0]


@pytest.mark.parametrize("policy", ["best_effort", "wait_complete", "timeout"])
@pytest.mark.parametrize("write_policy", ["write_through", "write_through_selective", "write_back"])
@pytest.mark.parametrize("seed", [1, 2])
def test_ranks_that_lose_pages_at_random_stay_together(open_team, policy, write_policy, seed):
    """Far more pages than the tiers hold, and now and then one rank loses some of what it has."""
    rng = random.Random(seed)
    team = open_team(MHA, tp=2, pp=2, prefetch_policy=policy, write_policy=write_policy)
    hits = 0
    for _ in range(60):
        tokens = [token for _ in range(rng.randint(1, 5)) for token in prompt(2, salt=rng.randrange(4))]
        hits += sum(team.hits(tokens + list(range(rng.randrange(PAGE)))))
        harmed = rng.randrange(4)
        if rng.random() < 0.3:
            pages = team.storages[harmed].pages
            for lost in rng.sample(sorted(pages), len(pages) // 4):
                pages.pop(lost)
        if rng.random() < 0.2:
            team.engines[harmed].flush_l1()
        if rng.random() < 0.2:
            team.engines[harmed].flush_l2()
    assert hits > 20


def test_an_argument_that_is_refused_is_refused_on_all_ranks_and_the_next_request_runs(open_team):
    team = open_team(MHA, tp=2)
    for tokens in (prompt(13), [-1] * PAGE):
        errors = team.errors(lambda engine, tokens=tokens: engine.prefill(tokens))
        assert [type(error) for error in errors] == [ValueError] * 2
    assert team.hits(prompt(10)) == {0}


@pytest.mark.parametrize("pages", [[3, 3], [3, 9], [9, 0]])
def test_ranks_that_run_different_requests_are_told(open_team, pages):
    team = open_team(MHA, tp=2, timeout=5.0, prefetch_policy="best_effort")

    def run(engine):
        rank = engine.shard.place.tp_rank
        return engine.prefill(prompt(pages[rank], salt=rank))

    assert [type(error) for error in team.errors(run)] == [RanksError] * 2
    assert all(error is not None for error in team.errors(lambda engine: engine.prefill(prompt(3))))


def test_ranks_that_were_opened_with_different_options_are_told(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    errors = {}

    def open_rank(rank):
        ranks = GlooRanks(Place(rank, 2), f"file://{tmp_path}/meeting", 10)
        try:
            TierEngine(KVShape.parse(MHA), PAGE, ranks=ranks, l1_tokens=(rank + 1) * PAGE)
        except RanksError as error:
            errors[rank] = str(error)
        ranks.close()

    threads = [threading.Thread(target=open_rank, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(errors) == [0, 1]
    assert all("do not act alike: rank" in error for error in errors.values())


def test_a_rank_that_is_gone_is_an_error_on_the_others_now_and_later(open_team):
    team = open_team(MHA, tp=2, timeout=30.0)
    team.prefill(prompt(3))
    team.engines[1].close()
    team.ranks[1].close()
    for _ in range(2):
        with pytest.raises(RanksError, match="rank 0 lost the others"):
            team.engines[0].prefill(prompt(6))


def test_a_rank_that_does_not_come_is_waited_for_as_long_as_was_said(open_team):
    team = open_team(MHA, tp=2, timeout=0.5)
    with pytest.raises(RanksError, match=r"did not come within 0\.5 seconds"):
        team.engines[0].prefill(prompt(6))


def test_ranks_that_do_not_meet_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(RanksError, match="the 2 ranks did not meet at file:"):
        GlooRanks(Place(0, 2), f"file://{tmp_path}/meeting", timeout=0.5)


def test_closing_while_a_rank_still_asks_its_storage_keeps_nobody(open_team, gate):
    team = open_team(MHA, tp=2, prefetch_policy="best_effort")
    team.prefill(prompt(6))
    team.forget()
    team.storages[1].before["exists"] = gate
    team.each(lambda engine: [engine.prefetch(prompt(6)) for _ in range(2)])
    assert gate.reached.wait(30)
    timer = threading.Timer(0.2, gate.opened.set)
    timer.start()
    team.each(lambda engine: engine.close())
    timer.join()
    assert [storage.registered for storage in team.storages] == [[], []]


def test_the_smallest_of_each_value_is_agreed_for_each_asker_apart(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    answers = {}

    def ask(rank):
        ranks = GlooRanks(Place(rank, 3), f"file://{tmp_path}/meeting")
        order = list(Asking) if rank else list(Asking)[::-1]
        threads = [threading.Thread(target=agree, args=(ranks, rank, asking)) for asking in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        ranks.close()

    def agree(ranks, rank, asking):
        offset = 100 * (asking is Asking.LOOKUP)
        answers[rank, asking] = ranks.agree(asking, "it", [offset + rank, offset - rank, offset])

    ranks = [threading.Thread(target=ask, args=(rank,)) for rank in range(3)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join(60)
    assert [answers[rank, Asking.REQUEST] for rank in range(3)] == [[0, -2, 0]] * 3
    assert [answers[rank, Asking.LOOKUP] for rank in range(3)] == [[100, 98, 100]] * 3


@pytest.mark.parametrize(
    ("shape", "place", "tp_lcm_size", "complaint"),
    [
        (MHA, Place(0, 3), None, "tp_size 3 does not divide the 4 heads"),
        (MHA, Place(0, 1, 0, 5), None, "pp_size 5 is more than the 4 layers"),
        (MHA, Place(0, 2), 3, "tp_lcm_size 3 does not divide the 4 heads"),
        (MHA, Place(0, 4), 2, "tp_lcm_size 2 is not a multiple of tp_size 4"),
    ],
)
def test_a_model_that_cannot_be_cut_that_way_says_why(shape, place, tp_lcm_size, complaint):
    with pytest.raises(SettingsError, match=complaint):
        Shard(KVShape.parse(shape), place, tp_lcm_size)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_heads_are_split_only_where_the_layout_keeps_them_apart(layout):
    io_backend = "kernel" if layout == "page_first" else "direct"
    options = {"l1_tokens": 12, "mem_layout": layout, "io_backend": io_backend}
    with pytest.raises(SettingsError, match=f"tp_lcm_size needs mem_layout page_head, not {layout}"):
        TierEngine(KVShape.parse(MHA), PAGE, tp_lcm_size=2, **options)


def test_a_place_that_there_is_not_is_refused():
    with pytest.raises(SettingsError, match="tp rank 2 is not one of 2 ranks"):
        Place(2, 2)


def test_ranks_share_a_namespace_exactly_when_their_bytes_are_the_same():
    def namespaces(shape, tp, pp):
        shards = [Shard(KVShape.parse(shape), Place.of(rank, tp, pp)) for rank in range(tp * pp)]
        return [shard.namespace(PAGE, "page_first", model="m").digest for shard in shards]

    for shape, tp, pp in GRIDS:
        assert len({*namespaces(shape, tp, pp), *namespaces(shape, 1, 1)}) == tp * pp + 1
    assert namespaces(MLA, 4, 1) == namespaces(MLA, 1, 1) * 4
    assert len(set(namespaces(MLA, 2, 2))) == 2
    alone = KVShape.parse(MHA).namespace(PAGE, "page_first", model="m").digest
    assert namespaces(MHA, 1, 1) == [alone]


def test_a_storage_that_was_opened_for_another_rank_is_refused(storage):
    storage.namespace = Shard(KVShape.parse(MHA), Place(1, 2)).namespace(PAGE, "layer_first")
    with pytest.raises(SettingsError, match=r"opened for pages with heads 2, and .* stores 4"):
        TierEngine(KVShape.parse(MHA), PAGE, l1_tokens=12, storage=storage)
