"""Every test here runs against the real ``sglang`` of its virtual environment."""

import cpu_stubs

cpu_stubs.install()

from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from real_cache import RealCache  # noqa: E402


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
