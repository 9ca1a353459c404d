"""Two tensor-parallel ranks of SGLang, two processes, one root directory.

Which rank writes, and how ranks agree on a prefix, is SGLang's own: its groups run over gloo,
and nothing here sets ``is_mla_model`` or ``backup_skip``. What pools of both ranks hold differs
wherever SGLang shards them, so a page that reached the wrong rank shows as wrong bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ranks import RankError, Ranks
from test_adapter import objects, ours

SGLANG = version("sglang")
PAGES = 5
RANKS = 2

MHA = {"kind": "mha"}
MLA = {"kind": "mla"}
MAMBA = {"kind": "mamba", "mem_layout": "page_first_direct", "io_backend": "direct"}
MLA_MAMBA = {**MAMBA, "latent": True}

WRITER_ONLY = SGLANG in ("0.5.10.post1", "0.5.14")
"""With MLA these versions back up nothing on the other ranks, their states included."""

REFUSED = pytest.mark.skipif(
    SGLANG == "0.5.10.post1", reason="refused on this version; its own test below says what happens"
)
ONE_STATE = pytest.mark.skipif(WRITER_ONLY, reason="with MLA this version backs up one rank's state only")
HYBRIDS = (pytest.param(MAMBA, id="mha"), pytest.param(MLA_MAMBA, id="mla", marks=ONE_STATE))


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Ranks]]:
    """Importing sglang twice costs more than all the tests: they share the processes, until
    a test leaves them ended."""
    made: list[Ranks] = []

    def running() -> Ranks:
        if not made or made[-1].ended:
            made.append(Ranks(RANKS, tmp_path_factory.mktemp("ranks")))
        return made[-1]

    yield running
    for ranks in made:
        ranks.end()


@pytest.fixture
def ranks(processes: Callable[[], Ranks]) -> Iterator[Ranks]:
    ranks = processes()
    yield ranks
    if not ranks.ended:
        ranks.each("close")


def attach(ranks: Ranks, model: dict[str, Any], root: Path) -> list[dict[str, Any]]:
    return ranks.each("open", spec=model, extra_config=ours(root=str(root), negative_ttl=0))


def restore(ranks: Ranks) -> tuple[list[int], list[list[int]]]:
    """After a loss of device and host: pages prefetched, and [pages, wrong bytes] on the device,
    of each rank."""
    ranks.each("forget")
    assert ranks.each("load_back", pages=PAGES) == [[0, 0]] * RANKS
    return ranks.each("prefetch", pages=PAGES), ranks.each("load_back", pages=PAGES)


def whole(pages: int) -> tuple[list[int], list[list[int]]]:
    """What ``restore`` says when all ranks got the same prefix, byte for byte."""
    return [pages] * RANKS, [[pages, 0]] * RANKS


def identities(root: Path) -> list[Any]:
    """The rank axes of every namespace under root."""
    found = [json.loads(path.read_text())["ranks"] for path in root.glob("*/namespace.json")]
    return sorted(found)


def pages_of(root: Path, rank: int) -> list[Path]:
    """What lies in the namespace of one rank."""

    def ranks_of(page: Path) -> Any:
        return json.loads((page.parents[1] / "namespace.json").read_text())["ranks"]

    return [page for page in objects(root) if ranks_of(page) == [["tp", rank, RANKS]]]


def states(root: Path) -> list[Path]:
    return sorted(page for page in objects(root) if ".mamba." in page.name)


def damage(page: Path) -> None:
    content = bytearray(page.read_bytes())
    content[-1] ^= 1
    page.write_bytes(content)


def test_pages_that_are_alike_on_all_ranks_are_stored_once_and_restored_by_all(
    ranks: Ranks, tmp_path: Path
) -> None:
    opened = attach(ranks, MLA, tmp_path)
    assert [rank["tp"] for rank in opened] == [[0, RANKS], [1, RANKS]]
    assert [rank["is_mla_model"] for rank in opened] == [True, True]
    assert [rank["backup_skip"] for rank in opened] == [False, True]
    assert ranks.each("store", pages=PAGES) == [PAGES, 0]
    assert identities(tmp_path) == [[]]
    assert len(objects(tmp_path)) == PAGES
    assert restore(ranks) == whole(PAGES)


def test_sharded_pages_are_stored_by_each_rank_and_restored_to_the_same_one(
    ranks: Ranks, tmp_path: Path
) -> None:
    opened = attach(ranks, MHA, tmp_path)
    assert [rank["backup_skip"] for rank in opened] == [False, False]
    assert ranks.each("store", pages=PAGES) == [PAGES, PAGES]
    assert identities(tmp_path) == [[["tp", 0, RANKS]], [["tp", 1, RANKS]]]
    first, second = pages_of(tmp_path, 0), pages_of(tmp_path, 1)
    assert len(first) == len(second) == PAGES
    assert {page.name for page in first} == {page.name for page in second}  # only namespaces differ
    assert not {page.read_bytes() for page in first} & {page.read_bytes() for page in second}
    assert restore(ranks) == whole(PAGES)


@pytest.mark.parametrize("loser", range(RANKS))
def test_a_rank_without_pages_does_not_hit_the_other_ranks(loser: int, ranks: Ranks, tmp_path: Path) -> None:
    attach(ranks, MHA, tmp_path)
    ranks.each("store", pages=PAGES)
    for page in pages_of(tmp_path, loser):
        page.unlink()
    assert restore(ranks) == whole(0)


@REFUSED
def test_states_are_stored_by_each_rank_beside_its_shard_of_kv(ranks: Ranks, tmp_path: Path) -> None:
    attach(ranks, MAMBA, tmp_path)
    ranks.each("store", pages=PAGES)
    for rank in range(RANKS):
        assert len(pages_of(tmp_path, rank)) == PAGES + 1
    assert len(states(tmp_path)) == RANKS
    assert restore(ranks) == whole(PAGES)


@ONE_STATE
def test_states_are_stored_by_each_rank_even_where_kv_is_stored_once(ranks: Ranks, tmp_path: Path) -> None:
    opened = attach(ranks, MLA_MAMBA, tmp_path)
    assert [rank["backup_skip"] for rank in opened] == [False, True]
    ranks.each("store", pages=PAGES)
    assert identities(tmp_path) == [[]]
    assert len(states(tmp_path)) == RANKS
    assert len(objects(tmp_path)) == PAGES + RANKS
    assert restore(ranks) == whole(PAGES)


@pytest.mark.skipif(SGLANG != "0.5.14", reason="this version backs up every rank's state, or none")
def test_a_state_that_one_rank_alone_backed_up_is_a_miss_on_both(ranks: Ranks, tmp_path: Path) -> None:
    """The other rank's heads must not get it: on these versions MLA hybrids gain nothing from L3
    at TP > 1, and lose nothing."""
    attach(ranks, MLA_MAMBA, tmp_path)
    assert ranks.each("store", pages=PAGES) == [PAGES, 0]
    assert len(states(tmp_path)) == 1
    assert restore(ranks) == whole(0)


@pytest.mark.parametrize("harm", [Path.unlink, damage])
@pytest.mark.parametrize("loser", range(RANKS))
def test_a_page_that_one_rank_lost_ends_the_prefix_on_both_until_it_is_stored_again(
    loser: int, harm: Callable[[Path], None], ranks: Ranks, tmp_path: Path
) -> None:
    """A missing page shows when SGLang asks what is there, a damaged one when it reads: ranks
    agree at either point, and by different collectives."""
    attach(ranks, MHA, tmp_path)
    ranks.each("store", pages=2)
    kept = pages_of(tmp_path, loser)
    ranks.each("store", pages=3)
    (third,) = set(pages_of(tmp_path, loser)) - set(kept)
    ranks.each("store", pages=PAGES)
    harm(third)
    assert restore(ranks) == whole(2)
    ranks.each("store", pages=PAGES)
    assert restore(ranks) == whole(PAGES)


@REFUSED
@pytest.mark.parametrize("loser", range(RANKS))
@pytest.mark.parametrize("model", HYBRIDS)
def test_a_state_that_one_rank_lost_leaves_both_the_last_prefix_whose_states_are_whole(
    model: dict[str, Any], loser: int, ranks: Ranks, tmp_path: Path
) -> None:
    attach(ranks, model, tmp_path)
    ranks.each("store", pages=3)
    kept = states(tmp_path)
    ranks.each("store", pages=PAGES)
    last = [state for state in states(tmp_path) if state not in kept]
    assert len(last) == RANKS
    last[loser].unlink()
    assert restore(ranks) == whole(3)


@pytest.mark.skipif(SGLANG != "0.5.10.post1", reason="later versions agree on loaded states")
def test_states_of_several_ranks_are_refused_where_ranks_do_not_agree_on_them(
    ranks: Ranks, tmp_path: Path
) -> None:
    """One unreadable state would leave the ranks with different trees, and then in different
    collectives: a server that hangs. Misses cost less."""
    attach(ranks, MAMBA, tmp_path)
    ranks.each("store", pages=PAGES)
    assert states(tmp_path) == []
    assert restore(ranks) == whole(0)


@REFUSED
@pytest.mark.parametrize("loser", range(RANKS))
@pytest.mark.parametrize("model", HYBRIDS)
def test_a_state_that_one_rank_cannot_read_is_used_by_neither(
    model: dict[str, Any], loser: int, ranks: Ranks, tmp_path: Path
) -> None:
    """Its damage shows only when the transfer is under way on both; KV without a state is no
    prefix that a hybrid can continue from."""
    attach(ranks, model, tmp_path)
    ranks.each("store", pages=PAGES)
    damage(states(tmp_path)[loser])
    _, loaded = restore(ranks)
    assert loaded == [[0, 0]] * RANKS


def test_a_rank_that_fails_is_reported_with_every_ranks_stderr_and_no_process_stays(
    ranks: Ranks,
) -> None:
    with pytest.raises(RankError, match=r"(?s)AttributeError.*no_such_call.*stderr of rank 1"):
        ranks.each("no_such_call")
    assert ranks.ended
