"""On SGLang's real controllers, in the environment that ``make test-sglang`` makes."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("SGLANG_PYTHON") or str(ROOT / ".venv-sglang-0.5.23" / "bin" / "python")
TESTS = ROOT / "tests_sglang"


@pytest.mark.skipif(not (TESTS / "test_any_backend.py").exists(), reason="outside the repository")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason="no SGLang: make test-sglang SGLANG=0.5.23 sets it up")
def test_sglang_gets_back_what_it_stored(ministack, namespace):
    settings = ministack.settings(checksum="off", prefix=f"sglang-{namespace.epoch}")
    projects = [ROOT, *ROOT.glob("plugins/*"), ROOT / "conformance"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, projects)),
        **{f"HICACHE_S3_{name.upper()}": value for name, value in settings.items()},
    }
    command = [PYTHON, "-m", "pytest", "-q", "-c", f"{TESTS}/pytest.ini", "--rootdir", str(TESTS)]
    done = subprocess.run(
        [*command, f"{TESTS}/test_any_backend.py", "--backend", "s3"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
