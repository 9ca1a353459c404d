"""Ranks: whatever each one's L3 holds and however slow it is, all restore the same prefix."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from typing import Any

from hicache_conformance.case import case
from hicache_conformance.harness import TORCH, Harness
from hicache_conformance.interposers import faulty
from hicache_conformance.outcomes import BrokenPromiseError, expect, require
from hicache_conformance.ranks.protocol import THRESHOLD, Agreements, prefetch
from hicache_conformance.ranks.simulator import DivergenceError, Place, Simulation, find_divergence
from hicache_conformance.ranks.stored import StoredRank, rank_namespace

GRID = (2, 2)
"""TP x PP ranks of the simulation."""
PAGES = 5
SEEDS = 40
GLOO_SECONDS = 60.0


class _Grid:
    """Simulated ranks, each with a client of its own, other pages in it, and other failures."""

    def __init__(self, h: Harness) -> None:
        self._h = h
        tp_size, pp_size = GRID
        self._ranks: dict[Place, StoredRank] = {}
        self._clock = random.Random(h.seed)
        for tp in range(tp_size):
            for pp in range(pp_size):
                namespace = rank_namespace(h.namespace, tp, tp_size, pp, pp_size)
                stack = h.stack(
                    faulty(seed=100 * tp + pp, page_error_rate=0.1),
                    namespace,
                    breaker_failures=1_000_000,
                    negative_ttl=0.0,
                    exists_seconds=20,
                    get_seconds=20,
                    set_seconds=20,
                )
                rank = StoredRank(stack, f"tp{tp}pp{pp}", self._clock)
                h.defer(rank.release)
                self._ranks[tp, pp] = rank

    def simulate(self, seed: int, agreements: Agreements) -> Simulation:
        """A request of which every rank has another prefix in its L3."""
        self._clock.seed(seed)
        rng = random.Random(seed)
        hashes = [f"{seed:04d}-{name}" for name in self._h.names(PAGES)]
        for rank in self._ranks.values():
            rank.store(hashes[: rng.choice((1, 2, PAGES, PAGES))])
        steps = {place: prefetch(rank, hashes, agreements) for place, rank in self._ranks.items()}
        return Simulation(steps, seed)


@case("ranks", seconds=60)
def simulated_ranks_agree(h: Harness) -> None:
    """Four ranks (TP 2 x PP 2) with different pages in L3 restore one prefix, in every interleaving.

    sglang#30760, sglang#33029, sglang#38284: ranks disagree on the state of a prefetch, one skips an
    all_reduce, and the scheduler hangs; seen in production. sglang#22607: the same with PP.
    """
    grid = _Grid(h)
    restored = []
    for seed in range(SEEDS):
        simulation = grid.simulate(seed, Agreements())
        try:
            restored.append(simulation.run())
        except DivergenceError as error:
            raise BrokenPromiseError(str(error)) from error
    require(any(pages >= THRESHOLD for pages in restored), "no simulated prefetch ever restored a page")


@case("ranks", seconds=60)
def simulator_finds_the_known_divergences(h: Harness) -> None:
    """With an agreement taken out, some interleaving of the same ranks parts: the simulator can see it.

    sglang#30760: one rank revokes a prefetch, another does not. sglang#33029: one stops by its own clock.
    sglang#26921: ranks insert prefixes of different length.
    """
    grid = _Grid(h)
    for left_out in ("on_hit", "on_end", "on_done"):
        agreements = Agreements(**{left_out: False})
        found = find_divergence(lambda seed, a=agreements: grid.simulate(seed, a), range(SEEDS))  # type: ignore[misc]
        if found is None:
            raise BrokenPromiseError(
                f"{SEEDS} interleavings without agreement {left_out}, and the ranks never parted: "
                "their L3s do not differ"
            )
        h.history.note(f"without agreement {left_out}: {found}")


@case("ranks", needs=(TORCH,), seconds=90)
def two_processes_agree(h: Harness) -> None:
    """Two real processes over gloo agree on every hit length, under delays, failures and other contents."""
    _agree_over_gloo(h, 2)


@case("ranks", needs=(TORCH,), seconds=120)
def four_processes_agree(h: Harness) -> None:
    """So do four; and MLA pages are written once, by one rank, and read by all (sglang#8865)."""
    _agree_over_gloo(h, 4)


def _agree_over_gloo(h: Harness, size: int) -> None:
    requests = [h.names(h.rng.randint(3, 6)) for _ in range(12)]
    mla = h.names(4)
    job: dict[str, Any] = {
        "backend": h.target.backend,
        "table": dict(h.target.table),
        "tmp": str(h.tmp),
        "tenant": h.namespace.tenant,
        "meeting": str(h.tmp / f"meeting-{size}"),
        "requests": requests,
        "mla": mla,
        "shared": h.capabilities.shared,
        "seed": h.seed,
        "size": size,
    }
    answers = _run_ranks(job)
    for number in range(len(requests)):
        restored = [answer["restored"][number] for answer in answers]
        hits = [answer["hits"][number] for answer in answers]
        h.history.note(f"request {number}: hits {hits}, restored {restored}")
        expect(restored, [restored[0]] * size, f"prefixes that {size} ranks restore for request {number}")
        require(restored[0] <= min(hits), f"request {number}: {restored[0]} restored of hits {hits}")
    require(any(sum(answer["restored"]) for answer in answers), "no request restored a page")
    expect(sum(answer["written"] for answer in answers), len(mla), f"MLA pages written by {size} ranks")
    if h.capabilities.shared:
        expect([answer["readable"] for answer in answers], [len(mla)] * size, "MLA pages that ranks can read")


def _run_ranks(job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each rank's process answers. Raises BrokenPromiseError when one fails or hangs."""
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hicache_conformance.ranks.gloo_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, errors = launcher.communicate(json.dumps(job, default=str), timeout=GLOO_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
        raise BrokenPromiseError("the ranks hang: one waits for another that does not come") from None
    answers = json.loads(out) if launcher.returncode == 0 else [None]
    if None in answers:
        raise BrokenPromiseError(f"rank {answers.index(None)} failed:\n{errors[-1500:]}")
    return list(answers)
