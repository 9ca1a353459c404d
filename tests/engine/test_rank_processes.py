"""Ranks in processes of their own, each with its part of the model, over one real store."""

import itertools
import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest

PAGE = 4
ANSWER_SECONDS = 120
MHA = "mha:4x4x8:bf16"
MLA = "mla:4x64:bf16"
MAMBA = "mha:3x4x24:fp32"
SPLIT = {"mem_layout": "page_head", "io_backend": "kernel", "tp_lcm_size": 4}


class RankProcesses:
    """Four processes of rank_process.py; a team is made of the first tp x pp of them."""

    def __init__(self):
        self._script = str(Path(__file__).with_name("rank_process.py"))
        self._ranks = []
        self.team = range(0)

    def start(self):
        """Replace those that have ended."""
        for process, connection in self._ranks:
            if process.poll() is not None:
                connection.close()
        self._ranks = [rank for rank in self._ranks if rank[0].poll() is None]
        while len(self._ranks) < 4:
            here, there = Pipe()
            command = [sys.executable, self._script, str(there.fileno())]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
            process = subprocess.Popen(command, env=environment, pass_fds=[there.fileno()])
            there.close()
            self._ranks.append((process, here))

    def ask(self, ranks, name, arguments):
        """What the call returned on each of these ranks, exceptions included."""
        for rank in ranks:
            self._ranks[rank][1].send((name, arguments(rank)))
        ends_at = time.monotonic() + ANSWER_SECONDS
        answers = []
        for rank in ranks:
            connection = self._ranks[rank][1]
            if not connection.poll(max(0.0, ends_at - time.monotonic())):
                self.end()
                pytest.fail(f"rank {rank} did not answer {name}")
            answers.append(connection.recv())
        return answers

    def each(self, name, **arguments):
        """What the call returned on each rank of the team."""
        answers = self.ask(self.team, name, lambda _rank: arguments)
        assert [answer for answer in answers if isinstance(answer, Exception)] == []
        return answers

    def kill(self, rank):
        self._ranks[rank][0].kill()
        self._ranks[rank][0].wait()

    def end(self):
        for process, connection in self._ranks:
            process.kill()
            process.wait()
            connection.close()
        self._ranks = []


@pytest.fixture(scope="module")
def processes():
    processes = RankProcesses()
    yield processes
    processes.end()


@pytest.fixture
def open_ranks(processes, tmp_path):
    """Opens engines on tp x pp ranks over one root directory, in place of those that were open."""
    names = itertools.count()

    def open_ranks(shape, tp, pp=1, mamba=None, **options):
        close()
        processes.start()
        processes.team = range(tp * pp)
        meeting = f"file://{tmp_path}/meeting-{next(names)}"
        arguments = {"shape": shape, "root": str(tmp_path / "root"), "meeting": meeting, "mamba": mamba}
        opened = processes.ask(
            processes.team,
            "open",
            lambda rank: {**arguments, "place": (rank % tp, tp, rank // tp, pp), **options},
        )
        assert opened == [None] * tp * pp
        return processes

    def close():
        if processes.team:
            processes.each("close")
        processes.team = range(0)

    yield open_ranks
    close()


def prompt(pages, salt=0):
    return [salt * 1000 + token for token in range(pages * PAGE)]


def prefill(ranks, pages):
    """How many pages came from each source, the same on all ranks; no byte may be wrong."""
    (answer, *others) = ranks.each("prefill", tokens=prompt(pages))
    assert others == [answer] * len(others)
    sources, wrong = answer
    assert wrong == 0
    return {source: sources.count(source) for source in sources}


def objects(tmp_path, part=""):
    """The files of pages whose names have ``part``."""
    files = [path for path in (tmp_path / "root").rglob("*") if path.is_file()]
    return sorted(path for path in files if part in path.name and len(path.name) >= 64)


@pytest.mark.parametrize(
    ("shape", "tp", "pp", "mamba", "stored"),
    [(MHA, 2, 1, None, 20), (MHA, 2, 2, None, 40), (MLA, 2, 1, None, 10), (MLA, 2, 1, MAMBA, 12)],
)
def test_what_ranks_stored_they_find_again_after_a_restart(
    open_ranks, tmp_path, shape, tp, pp, mamba, stored
):
    ranks = open_ranks(shape, tp, pp, mamba)
    assert prefill(ranks, 10) == {"recomputed": 10}
    assert ranks.each("forget") == [True] * tp * pp
    assert len(objects(tmp_path)) == stored
    assert prefill(ranks, 10) == {"L3": 10}
    ranks = open_ranks(shape, tp, pp, mamba)
    assert prefill(ranks, 12) == {"L3": 10, "recomputed": 2}


@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2), (1, 4)])
@pytest.mark.parametrize("mamba", [None, MAMBA])
def test_deployments_of_different_tp_size_share_pages_whose_heads_are_split(
    open_ranks, tmp_path, writers, readers, mamba
):
    ranks = open_ranks(MHA, writers, mamba=mamba, **SPLIT)
    assert prefill(ranks, 10) == {"recomputed": 10}
    assert ranks.each("forget") == [True] * writers
    assert len(objects(tmp_path)) == (44 if mamba else 40)
    ranks = open_ranks(MHA, readers, mamba=mamba, **SPLIT)
    assert prefill(ranks, 12) == {"L3": 10, "recomputed": 2}
    assert ranks.each("forget") == [True] * readers
    ranks = open_ranks(MHA, writers, mamba=mamba, **SPLIT)
    assert prefill(ranks, 12) == {"L3": 12}


def test_without_split_heads_deployments_of_different_tp_size_share_nothing(open_ranks):
    options = {**SPLIT, "tp_lcm_size": None}
    ranks = open_ranks(MHA, 2, **options)
    prefill(ranks, 10)
    assert ranks.each("forget") == [True] * 2
    assert prefill(open_ranks(MHA, 4, **options), 10) == {"recomputed": 10}


@pytest.mark.parametrize("harm", ["lost", "damaged"])
@pytest.mark.parametrize(("writers", "readers"), [(2, 4), (4, 2)])
def test_one_slice_of_heads_that_is_bad_is_a_page_that_is_not_there(
    open_ranks, tmp_path, writers, readers, harm
):
    ranks = open_ranks(MHA, writers, **SPLIT)
    prefill(ranks, 6)
    assert ranks.each("forget") == [True] * writers
    stored = set(objects(tmp_path))
    prefill(ranks, 10)
    assert ranks.each("forget") == [True] * writers
    slices = sorted(path for path in set(objects(tmp_path)) - stored if ".heads3of4" in path.name)
    for path in slices:
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        if harm == "lost":
            path.unlink()
    ranks = open_ranks(MHA, readers, **SPLIT)
    assert prefill(ranks, 10) == {"L3": 6, "recomputed": 4}
    assert ranks.each("forget") == [True] * readers
    assert prefill(ranks, 10) == {"L3": 10}


def test_a_rank_that_dies_is_an_error_on_the_others(open_ranks, processes):
    open_ranks(MHA, 2, timeout=30.0)
    processes.kill(1)
    (answer,) = processes.ask([0], "prefill", lambda _rank: {"tokens": prompt(3)})
    assert "RanksError: rank 0 lost the others" in str(answer)
    processes.team = range(1)
