"""The workflows that we and other people's CI run: parsed, and their commands run."""

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = ROOT / ".github" / "workflows"
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def jobs(name):
    return yaml.safe_load((WORKFLOWS / name).read_text())["jobs"]


def make_commands():
    """Every make command of ci.yml, for every point of its matrix."""
    for job in jobs("ci.yml").values():
        matrix = job["strategy"]["matrix"]
        for point in product(*matrix.values()):
            for step in job["steps"]:
                command = step.get("run", "")
                for key, value in zip(matrix, point, strict=True):
                    command = command.replace(f"${{{{ matrix.{key} }}}}", value)
                if command:
                    yield command


def test_every_command_of_our_own_ci_is_a_target_that_make_knows():
    commands = set(make_commands())
    assert len(commands) > 12
    for command in commands:
        assert "${{" not in command
        done = subprocess.run(
            ["bash", "-c", f"{command} --dry-run"], check=False, cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_the_sglang_matrix_selects_every_layout_and_the_versions_there_are():
    matrix = jobs("ci.yml")["sglang"]["strategy"]["matrix"]
    pinned = {
        p.stem.removeprefix("requirements-") for p in (ROOT / "tests_sglang").glob("requirements-*.txt")
    }
    assert set(matrix["sglang"]) == pinned
    layouts = {"mha-layer_first-kernel", "mha-page_first-kernel", "mha-page_first_direct-direct"}
    for name in (*layouts, "mha-page_head-kernel"):
        assert sum(layout in name for layout in matrix["layout"]) == 1


@pytest.mark.parametrize("backend", ["file", "dict_backend:DictStorage"])
def test_the_reusable_workflow_proves_a_backend_and_keeps_the_reports(backend, tmp_path):
    (job,) = jobs("conformance.yml").values()
    (command,) = (step["run"] for step in job["steps"] if step.get("name") == "Prove the backend")
    given = {"backend": backend, "arguments": "--group contract"}
    command = re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda m: given[m[1]], command)
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT / "examples")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"conformance.json", "conformance.html", "conformance.xml"} <= {p.name for p in tmp_path.iterdir()}
