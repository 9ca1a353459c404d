"""What ``pytest --pyargs hicache_conformance`` collects."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from hicache_conformance.case import Case
from hicache_conformance.cli import probe
from hicache_conformance.outcomes import Outcome
from hicache_conformance.runner import judged, run_case
from hicache_conformance.target import Target
from hicache_conformance.xfail import read_xfail
from hicache_storage import Capabilities
from hicache_storage.settings import parse_assignments, read_table


@pytest.fixture(scope="session")
def hicache_target(pytestconfig: pytest.Config) -> Target:
    config, settings = pytestconfig.getoption("--hicache-config"), pytestconfig.getoption("--hicache-set")
    table = {**(read_table(config) if config else {}), **parse_assignments(settings)}
    return Target(pytestconfig.getoption("--hicache-backend"), table)


@pytest.fixture(scope="session")
def hicache_capabilities(hicache_target: Target) -> Capabilities:
    return probe(hicache_target)


@pytest.fixture(scope="session")
def hicache_xfail(pytestconfig: pytest.Config) -> Mapping[str, str]:
    file = pytestconfig.getoption("--hicache-xfail")
    return read_xfail(Path(file)) if file else {}


def test_conformance(
    hicache_case: Case,
    hicache_target: Target,
    hicache_capabilities: Capabilities,
    hicache_xfail: Mapping[str, str],
    pytestconfig: pytest.Config,
) -> None:
    seed = pytestconfig.getoption("--hicache-seed")
    result = run_case(hicache_case, hicache_target, hicache_capabilities, seed)
    result = judged(result, hicache_xfail.get(hicache_case.name))
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(f"unsupported: {result.message}")
    if result.outcome is Outcome.EXPECTED_FAIL:
        pytest.xfail(result.message)
    if result.outcome is Outcome.FAIL:
        lines = [result.message, "", *result.history, "", hicache_case.promise, f"seed {seed}"]
        pytest.fail("\n".join(lines), pytrace=False)
