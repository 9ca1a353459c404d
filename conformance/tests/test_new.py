"""``hicache-storage new``: an empty folder becomes a plugin that the suite is content with."""

import pytest
import yaml

from hicache_conformance.case import select
from hicache_conformance.cli import probe
from hicache_conformance.outcomes import Outcome
from hicache_conformance.runner import run_case
from hicache_conformance.target import Target
from hicache_storage import SettingsError
from hicache_storage.cli.new import write_skeleton
from hicache_storage.settings import read_file


def test_the_skeleton_passes_the_suite(plugin_path):
    write_skeleton("my-backend", plugin_path / "plugin")
    (plugin_path / "my_backend").symlink_to(plugin_path / "plugin" / "my_backend")
    target = Target("my_backend:MyBackendStorage")
    capabilities = probe(target)
    assert capabilities.persistent
    cases = [
        case for case in select(groups=["contract", "identity", "lifecycle"]) if "64_mib" not in case.name
    ]
    results = [run_case(case, target, capabilities, seed=5) for case in cases]
    failed = [f"{r.case.name}: {r.message}" for r in results if r.outcome is Outcome.FAIL]
    assert failed == []


def test_the_project_names_its_backend_and_runs_the_suite_in_ci(tmp_path):
    write_skeleton("my-backend", tmp_path / "x")
    project = read_file(tmp_path / "x/pyproject.toml")
    points = project["project"]["entry-points"]["hicache_storage.backends"]
    assert points == {"my-backend": "my_backend:MyBackendStorage"}
    workflow = yaml.safe_load((tmp_path / "x/.github/workflows/conformance.yml").read_text())
    commands = [step.get("run", "") for step in workflow["jobs"]["conformance"]["steps"]]
    assert any(command.startswith("hicache-conformance --backend my-backend ") for command in commands)
    assert workflow["jobs"]["conformance"]["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "precious").write_text("mine")
    with pytest.raises(SettingsError, match="not empty; nothing was written"):
        write_skeleton("my-backend", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.parametrize("name", ["My-Backend", "", "-x", "a--b", "../x", "class", "1st"])
def test_a_bad_name_is_refused(tmp_path, name):
    with pytest.raises(SettingsError, match="no name for a plugin"):
        write_skeleton(name, tmp_path / "x")
    assert not (tmp_path / "x").exists()
