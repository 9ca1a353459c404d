"""What cannot fail is no test: every case has a mutant, and every mutant is caught."""

import pytest

from hicache_conformance.case import all_cases, select
from hicache_conformance.cli import probe
from hicache_conformance.mutants import all_mutants
from hicache_conformance.outcomes import Outcome
from hicache_conformance.runner import run_case

CLAIMS = [(mutant, case) for mutant in all_mutants() for case in mutant.claimed_by]


@pytest.mark.parametrize(("mutant", "name"), CLAIMS, ids=[f"{m.name}-{case}" for m, case in CLAIMS])
def test_a_mutant_is_killed_by_the_case_that_claims_it(mutant, name):
    [case] = select([name])
    result = run_case(case, mutant.target, probe(mutant.target), seed=0)
    assert result.outcome is Outcome.FAIL, f"{mutant.name} survived: {mutant.fault}\n{result.message}"
    assert result.message


def test_every_case_can_fail():
    claimed = {name for mutant in all_mutants() for name in mutant.claimed_by}
    assert [case.name for case in all_cases() if case.name not in claimed] == []


def test_there_are_mutants_enough():
    assert len(all_mutants()) >= 40
