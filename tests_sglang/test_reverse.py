"""SGLang's own backends under our contract, as ``sglang:<name>``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hicache_storage import Buffer, Namespace, SettingsError, Status, open_storage
from hicache_storage.engine import KVShape, TierEngine

SPACE = Namespace(model="tests/tiny", page_size=64)


def pages(count: int, seed: int) -> tuple[list[list[Buffer]], list[bytes]]:
    """Pages of two buffers each, and what they hold."""
    memory = [[bytearray([seed + i]) * 96, bytearray([seed + i + 100]) * 32] for i in range(count)]
    return [[Buffer.of(part) for part in page] for page in memory], [b"".join(page) for page in memory]


@pytest.mark.parametrize("integrity", [True, False])
def test_pages_go_through_sglangs_file_backend_unchanged(integrity: bool, storage_dir: Path) -> None:
    written, content = pages(5, seed=1)
    keys = [f"{i:064x}" for i in range(5)]
    with open_storage("sglang:file", {"integrity": integrity}, SPACE) as storage:
        assert storage.batch_set_from(keys, written) == [Status.OK] * 5
        assert storage.batch_exists([*keys, "f" * 64]) == [True] * 5 + [False]
        read, _ = pages(5, seed=50)
        assert storage.batch_get_into(keys, read) == [Status.OK] * 5
        assert [b"".join(b.view for b in page) for page in read] == content
        missing, _ = pages(1, seed=0)
        assert storage.batch_get_into(["f" * 64], missing) == [Status.MISSING]


def test_presence_after_a_gap_is_found_too(storage_dir: Path) -> None:
    written, _ = pages(3, seed=1)
    with open_storage("sglang:file", {}, SPACE) as storage:
        storage.batch_set_from(["a", "c", "e"], written)
        assert storage.batch_exists(list("abcde")) == [True, False, True, False, True]


def test_our_integrity_finds_what_sglangs_backend_would_serve(storage_dir: Path) -> None:
    written, _ = pages(2, seed=1)
    with open_storage("sglang:file", {}, SPACE) as storage:
        storage.batch_set_from(["a", "b"], written)
        damaged = next(storage_dir.glob("*-a*.bin"))
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        assert storage.batch_get_into(["a", "b"], written) == [Status.CORRUPT, Status.OK]


def test_the_engine_runs_on_sglangs_file_backend(storage_dir: Path) -> None:
    shape = KVShape.parse("mha:2x2x8:bf16")
    with open_storage("sglang:file", {}, shape.namespace(64, "page_first")) as storage:
        engine = TierEngine(
            shape,
            64,
            l1_tokens=512,
            mem_layout="page_first",
            io_backend="kernel",
            prefetch_policy="wait_complete",
            storage=storage,
        )
        tokens = list(range(512))
        engine.prefill(tokens)
        engine.wait_for_backup()
        engine.flush_l1()
        engine.flush_l2()
        report = engine.prefill(tokens)
        engine.close()
    assert report.wrong_bytes == 0
    assert {source.value for source in report.sources} == {"L3"}


@pytest.mark.parametrize(
    ("name", "missing", "says"),
    [
        ("mooncake", ["mooncake"], "pip install mooncake-transfer-engine"),
        ("nixl", ["nixl", "nixl._api"], "pip install nixl"),
    ],
)
def test_what_is_missing_is_named_with_what_to_install(
    name: str, missing: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(SettingsError, match=says):
        open_storage(f"sglang:{name}", {}, SPACE)


def test_a_mistyped_builtin_is_told_from_those_that_there_are() -> None:
    with pytest.raises(SettingsError, match=r"SGLang has no backend 'fiel'; it has .*file"):
        open_storage("sglang:fiel", {}, SPACE)
