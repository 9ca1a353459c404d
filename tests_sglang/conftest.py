"""Every test here runs against the real ``sglang`` of its virtual environment."""

import cpu_stubs

cpu_stubs.install()

import json  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from real_cache import RealCache  # noqa: E402


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which backend test_any_backend.py asks; the file plugin in a fresh directory by default."""
    parser.addoption("--backend", default="file", help="name of the backend of test_any_backend.py")
    parser.addoption("--set", action="append", metavar="K=V", help="a setting; {tmp} is a fresh directory")


@pytest.fixture
def any_backend(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """``backend`` and the settings that the command line gives it."""
    name = request.config.getoption("--backend")
    given = request.config.getoption("--set") or (["root={tmp}"] if name == "file" else [])
    settings: dict[str, Any] = {"backend": name}
    for assignment in given:
        key, _, text = assignment.replace("{tmp}", str(tmp_path)).partition("=")
        try:
            settings[key] = json.loads(text)
        except ValueError:
            settings[key] = text
    return settings


@pytest.fixture
def storage_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where SGLang's built-in ``file`` backend keeps its pages during this test."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def real_cache() -> Iterator[Callable[..., RealCache]]:
    """Makes caches and detaches them again, so no SGLang thread outlives its test."""
    made: list[RealCache] = []

    def make(*args: Any, **kwargs: Any) -> RealCache:
        made.append(RealCache(*args, **kwargs))
        return made[-1]

    yield make
    for cache in made:
        cache.close()
