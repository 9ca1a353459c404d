"""The same cases through pytest, one test each."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

INSTALLED = any(point.name == "hicache_conformance" for point in entry_points(group="pytest11"))
PLUGIN = [] if INSTALLED else ["-p", "hicache_conformance.pytest_plugin"]


def pytest_run(*arguments, cwd):
    """Run pytest as an author's CI does; the finished process."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:cacheprovider", "-q"),
            *("--pyargs", "hicache_conformance", *arguments),
        ],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def test_each_case_is_a_test(tmp_path):
    (tmp_path / "xfail.toml").write_text('"contract.round_trip" = "stores nothing"\n')
    run = pytest_run(
        *("--hicache-backend", "hicache_conformance.mutants.answers:StoresNothing"),
        *(
            "--hicache-xfail",
            "xfail.toml",
            "-k",
            "round_trip or empty_batch or missing_key or delete_then or two_clients",
        ),
        cwd=tmp_path,
    )
    assert run.returncode == 1, run.stdout
    assert "1 failed, 2 passed, 2 skipped" in run.stdout
    assert "1 xfailed" in run.stdout
    assert "batch_set_from(" in run.stdout, "a failure shows what was done"


def test_settings_reach_the_backend(tmp_path):
    run = pytest_run(
        *("--hicache-backend", "hicache_conformance.directory:DirectoryStorage"),
        *("--hicache-set", "root={tmp}/pages", "-k", "round_trip"),
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stdout
    assert "1 passed" in run.stdout


def test_without_a_backend_nothing_is_collected(tmp_path):
    run = pytest_run(cwd=tmp_path)
    assert "no tests ran" in run.stdout
