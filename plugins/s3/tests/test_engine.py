"""Through the reference engine: prefixes come back from the bucket, byte for byte."""

import importlib.util

import pytest

from hicache_storage import open_storage

PAGE_SIZE = 16


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_an_engine_finds_what_another_one_stored(ministack, namespace, layout):
    from hicache_storage.engine import KVShape, Source, TierEngine

    shape = KVShape.mha(layers=2, heads=2, head_dim=16)
    tokens = list(range(namespace.epoch, namespace.epoch + PAGE_SIZE * 40))
    settings = ministack.settings(checksum="off")
    wanted = {0: Source.RECOMPUTED, 1: Source.L3}
    for turn, source in wanted.items():
        with (
            open_storage("s3", settings, namespace) as storage,
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
            assert report.pages(source) == 40, (turn, report)
            assert engine.wait_for_backup(20)
            assert engine.stats.storage_errors == 0
