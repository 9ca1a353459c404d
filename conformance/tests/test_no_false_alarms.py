"""Sound backends pass every case that applies to them, whatever the seed.

More seeds: ``HICACHE_CONFORMANCE_SEEDS=1000 pytest conformance/tests/test_no_false_alarms.py``.
"""

import os

import pytest

from hicache_conformance.case import all_cases, select
from hicache_conformance.cli import probe
from hicache_conformance.outcomes import Outcome
from hicache_conformance.runner import run_case
from hicache_conformance.target import Target

SOUND = [
    "hicache_conformance.reference:ReferenceStorage",
    "hicache_conformance.native:NativeStorage",
    "hicache_conformance.directory:DirectoryStorage",
]
SLOW = ("contract.a_64_mib_object", "content.thousand_corruptions")
FIRST_SEED = int(os.environ.get("HICACHE_CONFORMANCE_FIRST_SEED", "0"))
SEEDS = int(os.environ.get("HICACHE_CONFORMANCE_SEEDS", "2"))
QUICK = ("contract", "identity", "content")
"""Groups cheap enough to run over many seeds every time."""


def failures(backend, cases, seed):
    target = Target(backend)
    capabilities = probe(target)
    results = [run_case(case, target, capabilities, seed) for case in cases]
    return [
        f"{result.case.name} seed {seed}: {result.message}"
        for result in results
        if result.outcome is Outcome.FAIL
    ]


@pytest.mark.parametrize("backend", SOUND)
def test_a_sound_backend_passes_every_case(backend):
    cases = all_cases()
    if backend != SOUND[-1] and SEEDS <= 10:  # real processes once are enough for every day
        cases = [case for case in cases if not case.name.endswith("_processes_agree")]
    assert failures(backend, cases, FIRST_SEED) == []


@pytest.mark.parametrize("backend", SOUND)
@pytest.mark.parametrize("seed", range(FIRST_SEED + 1, FIRST_SEED + SEEDS))
def test_no_seed_makes_a_false_alarm(backend, seed):
    cases = all_cases() if SEEDS > 10 else [c for c in select(groups=QUICK) if c.name not in SLOW]
    assert failures(backend, cases, seed) == []


REFUSES_FORKED_CHILDREN = """
import os
from hicache_conformance.directory import DirectoryStorage
from hicache_storage import UnsupportedError

opened_in = set()

class RefusesForkedChildren(DirectoryStorage):
    def __init__(self, settings, namespace):
        opened_in.add(os.getpid())
        if len(opened_in) > 1:
            raise UnsupportedError("spawn this process instead")
        super().__init__(settings, namespace)
"""


def test_a_client_library_that_a_forked_child_cannot_use_is_unsupported(plugin_path):
    (plugin_path / "library_of_threads.py").write_text(REFUSES_FORKED_CHILDREN)
    [case] = select(["lifecycle.fork_is_safe"])
    target = Target("library_of_threads:RefusesForkedChildren")
    result = run_case(case, target, probe(target), seed=0)
    assert result.outcome is Outcome.UNSUPPORTED
    assert "spawn this process instead" in result.message
