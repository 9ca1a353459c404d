"""Under SGLang itself: its real controllers on our backend, and its own backend under our contract."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang-0.5.23" / "bin" / "python"))
"""The interpreter with SGLang, ours and NIXL's wheel; tests_sglang/setup_env.sh makes it."""


def run(*arguments, **environment):
    if not PYTHON.exists():
        pytest.skip("SGLang's environment is not there: sh tests_sglang/setup_env.sh 0.5.23")
    paths = [ROOT, ROOT / "plugins" / "nixl", ROOT / "tests_sglang", os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [PYTHON, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("plugin", ["posix", "obj"])
def test_sglangs_controllers_keep_their_promises_on_nixl(request, plugin):
    if plugin == "posix":
        settings = {"plugin": "posix", "root": "{tmp}", "capacity": "1GB", "min_free": 0}
    else:
        settings = {"plugin": "obj", "params": json.dumps(request.getfixturevalue("server").params())}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    config = ["-c", "tests_sglang/pytest.ini", "--rootdir", "tests_sglang"]
    file = "tests_sglang/test_any_backend.py"
    said = run("-m", "pytest", "-q", *config, file, "--backend", "nixl", *given)
    assert " passed" in said
    assert "skipped" not in said


OWN = """
import sys
import cpu_stubs
cpu_stubs.install()
from hicache_storage import Buffer, Namespace, Status, open_storage
import mmap
memory = Buffer.of(mmap.mmap(-1, 1 << 20))
pages = [[memory.slice(8192 * i, 4096), memory.slice(8192 * i + 4096, 4096)] for i in range(16)]
for i, page in enumerate(pages):
    page[0].view[:] = page[1].view[:] = bytes([i]) * 4096
keys = [f"page-{i}" for i in range(16)]
table = {"plugin": {"posix": {"active": True}}, "page_nbytes": 8192, "l3_cleaner_enabled": False}
table |= {"integrity": False, "deadline": False}  # they use memory that its registration does not know
with open_storage("sglang:nixl", table, Namespace(model="sglang/own")) as storage:
    storage.register_buffer(memory)
    assert storage.batch_set_from(keys, pages) == [Status.OK] * 16
    memory.view[:] = bytes(1 << 20)
    assert storage.batch_get_into(keys, pages) == [Status.OK] * 16
    assert all(bytes(half.view) == bytes([i]) * 4096 for i, page in enumerate(pages) for half in page)
    mixed = ["none", *keys[1:]]
    assert sum(map(bool, storage.batch_get_into(mixed, pages))) == 0
    print("same bytes, and nothing of a batch with one page missing")
"""


def test_sglangs_own_nixl_backend_works_under_our_contract(tmp_path):
    said = run("-c", OWN, SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR=str(tmp_path))
    assert "same bytes" in said
