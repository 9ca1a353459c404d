"""Through the reference engine: prefixes come back from files and from objects, byte for byte."""

import importlib.util

import pytest

from hicache_storage import open_storage

PAGE_SIZE = 16


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("plugin", ["posix", "obj"])
def test_an_engine_finds_what_another_one_stored(request, root, namespace, layout, plugin):
    from hicache_storage.engine import KVShape, Source, TierEngine

    if plugin == "posix":
        settings = {"plugin": plugin, "root": str(root), "capacity": "1GB", "min_free": 0}
    else:
        settings = {"plugin": plugin, "params": request.getfixturevalue("server").params(), "epoch": 7}
    shape = KVShape.mha(layers=2, heads=2, head_dim=16)
    tokens = list(range(PAGE_SIZE * 40 + 1))
    for turn, source in enumerate([Source.RECOMPUTED, Source.L3]):
        with (
            open_storage("nixl", {**settings, "revision": layout}, namespace) as storage,
            TierEngine(
                shape,
                PAGE_SIZE,
                l1_tokens=PAGE_SIZE * 64,
                mem_layout=layout,
                io_backend="kernel",
                prefetch_policy="wait_complete",
                storage=storage,
            ) as engine,
        ):
            report = engine.prefill(tokens)
            assert report.wrong_bytes == 0
            assert report.pages(source) >= 40, (turn, report)
            assert engine.wait_for_backup(20)
            assert engine.stats.storage_errors == 0
