"""The same cases as pytest tests, for an author's own CI.

``pytest --pyargs hicache_conformance --hicache-backend my_backend --hicache-set key=value``
"""

from __future__ import annotations

from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("test_conformance.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of their own prefix, so that they meet no other plugin's."""
    group = parser.getgroup("hicache-conformance")
    group.addoption("--hicache-backend", metavar="NAME", help="backend to test: a name or module:Class")
    group.addoption("--hicache-set", metavar="K=V", action="append", default=[], help="a setting of it")
    group.addoption("--hicache-config", metavar="@FILE", default="", help="settings of it, from a file")
    group.addoption("--hicache-seed", metavar="N", type=int, default=0, help="seed of the cases")
    group.addoption("--hicache-xfail", metavar="FILE", help="cases known to fail, with reasons")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without a backend there is nothing to test; a run of another suite must not stumble over us."""
    if collection_path == SUITE and not config.getoption("--hicache-backend"):
        return True
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a case."""
    if "hicache_case" in metafunc.fixturenames:
        from hicache_conformance.case import all_cases

        metafunc.parametrize("hicache_case", all_cases(), ids=lambda case: case.name)
