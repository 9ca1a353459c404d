"""Options by SGLang's names, and the rules by which SGLang changes them: never in silence."""

import pytest

from hicache_storage import SettingsError
from hicache_storage.engine import COPIED_BY, LAYOUTS, EngineOptions, KVShape, TierEngine, resolve

SHAPE = KVShape.parse("mha:2x2x8:bf16")


def options(**given):
    return EngineOptions(4, l1_tokens=40, **given)


@pytest.mark.parametrize(
    ("given", "in_force", "note"),
    [
        (
            {"mem_layout": "page_first_direct", "io_backend": "kernel"},
            {"mem_layout": "page_first_direct", "io_backend": "direct"},
            "io_backend is direct, not kernel",
        ),
        (
            {"mem_layout": "page_first", "io_backend": "direct"},
            {"mem_layout": "page_first_direct", "io_backend": "direct"},
            "mem_layout is page_first_direct, not page_first",
        ),
    ],
)
def test_what_sglang_rewrites_is_rewritten_and_said(given, in_force, note):
    resolved, notes = resolve(options(**given))
    assert resolved == options(**in_force)
    assert len(notes) == 1
    assert note in notes[0]
    assert "SGLang 0.5.23" in notes[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_sglang_can_copy_stays_as_it_is(layout):
    for io_backend in COPIED_BY[layout]:
        given = options(mem_layout=layout, io_backend=io_backend)
        assert resolve(given) == (given, ())


def test_resolving_twice_changes_nothing_more():
    resolved, _ = resolve(options(mem_layout="page_first", io_backend="direct"))
    assert resolve(resolved) == (resolved, ())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mem_layout": "page_last"}, "mem_layout 'page_last' is none of: layer_first, page_first"),
        ({"io_backend": "rdma"}, "io_backend 'rdma' is none of: direct, kernel"),
        ({"write_policy": "write_around"}, "write_policy 'write_around' is none of: write_through"),
        ({"prefetch_policy": "eager"}, "prefetch_policy 'eager' is none of: best_effort, wait_complete"),
        ({"prefetch_threshold": -1}, "not negative"),
        ({"backup_wait": float("nan")}, "backup_wait"),
    ],
)
def test_what_is_not_there_names_the_choices(given, message):
    with pytest.raises(SettingsError, match=message):
        resolve(options(**given))


def test_an_engine_tells_the_log_what_was_changed(caplog):
    with TierEngine(SHAPE, 4, l1_tokens=40, mem_layout="page_first", io_backend="direct") as engine:
        assert engine.options.mem_layout == "page_first_direct"
        assert engine.notes[0] in caplog.text


def test_a_storage_opened_for_another_layout_is_refused(storage):
    """The rewrite would store bytes in an order that their keys do not say."""
    storage.namespace = SHAPE.namespace(4, "page_first")
    with pytest.raises(
        SettingsError, match=r"open it with shape.namespace\(page_size, 'page_first_direct'\)"
    ):
        TierEngine(SHAPE, 4, l1_tokens=40, mem_layout="page_first", storage=storage)
    assert storage.registered == []
    with TierEngine(
        SHAPE, 4, l1_tokens=40, mem_layout="page_first", io_backend="kernel", storage=storage
    ) as engine:
        assert engine.prefill(list(range(20))).wrong_bytes == 0


def test_an_option_that_does_not_exist_is_no_option():
    with pytest.raises(TypeError, match="hicache_ration"):
        TierEngine(SHAPE, 4, l1_tokens=40, hicache_ration=3.0)
