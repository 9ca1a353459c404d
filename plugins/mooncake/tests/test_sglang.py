"""Under SGLang itself: its real controllers on our backend, and its own backend under our contract."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang-0.5.23" / "bin" / "python"))
"""The interpreter with SGLang, ours and Mooncake's wheel; tests_sglang/setup_env.sh makes it."""

pytestmark = [
    pytest.mark.wheel,
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: make test-sglang SGLANG=0.5.23 sets it up"),
]


@pytest.fixture(scope="module")
def sglang(shared_cluster):
    """Run Python in SGLang's environment, with the cluster's settings as ``--set`` or ``K=V`` arguments."""
    paths = [ROOT, ROOT / "plugins" / "mooncake", ROOT / "tests_sglang"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    settings = [f"{key}={value}" for key, value in shared_cluster.table().items()]

    def run(*arguments, settings_as=""):
        given = [word for pair in settings for word in (*settings_as.split(), pair)]
        done = subprocess.run(
            [PYTHON, *arguments, *given],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run


def test_sglangs_controllers_keep_their_promises_on_mooncake(sglang):
    config = ["-c", "tests_sglang/pytest.ini", "--rootdir", "tests_sglang"]
    said = sglang(
        "-m",
        "pytest",
        "-q",
        *config,
        "tests_sglang/test_any_backend.py",
        "--backend",
        "mooncake",
        settings_as="--set",
    )
    assert " passed" in said
    assert "skipped" not in said


OWN = """
import sys
import cpu_stubs
cpu_stubs.install()
from hicache_storage import Buffer, Namespace, Status, open_storage
table = dict(pair.split("=", 1) for pair in sys.argv[1:])
table |= {"global_segment_size": 0, "master_metrics_port": int(table["master_metrics_port"])}
shapes = {"halves": (4096, 4096), "whole": (8192,), "scattered": (100, 8000, 92)}
with open_storage("sglang:mooncake", table, Namespace(model="sglang/own")) as storage:
    for name, sizes in shapes.items():
        written = [[Buffer.of(bytearray([i + k]) * n) for k, n in enumerate(sizes)] for i in range(4)]
        keys = [f"{name}-{i}" for i in range(4)]
        assert storage.batch_set_from(keys, written) == [Status.OK] * 4, name
        assert storage.batch_exists([*keys, "none"]) == [True] * 4 + [False], name
        read = [[Buffer.of(bytearray(n)) for n in sizes] for _ in range(4)]
        assert storage.batch_get_into(keys, read) == [Status.OK] * 4, name
        assert [[bytes(b.view) for b in p] for p in read] == [[bytes(b.view) for b in p] for p in written]
    print("same bytes")
"""


def test_sglangs_own_mooncake_backend_works_under_our_contract(sglang):
    assert "same bytes" in sglang("-c", OWN)
