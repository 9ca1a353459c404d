"""What the tests of the suite share."""

import sys

import pytest

from hicache_conformance.cases import capacity, outages


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch):
    """What never happens in a mutant need not be waited for as long as on a busy machine."""
    monkeypatch.setattr(capacity, "PATIENCE", 2.0)
    monkeypatch.setattr(outages, "PATIENCE", 3.0)


@pytest.fixture
def plugin_path(tmp_path, monkeypatch):
    """A directory on the import path, also of the processes that are started."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name, module in sys.modules.items() if _lies_in(module, tmp_path)]:
        del sys.modules[name]


def _lies_in(module, directory):
    return str(getattr(module, "__file__", "")).startswith(str(directory))
