"""What SGLang asks of a dynamic backend, version by version, recorded from its own controllers."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import pytest

from real_cache import RealCache
from real_pools import CacheSpec
from recording_backend import RecordingBackend

SGLANG = version("sglang")
NEWEST = SGLANG == "0.5.23"
PAGES = 5


def recorder(**options: Any) -> dict[str, Any]:
    return {
        "backend_name": "recorder",
        "module_path": "recording_backend",
        "class_name": "RecordingBackend",
        **options,
    }


def attach_calls(*sidecars: str) -> list[str]:
    """Newer versions register every pool twice over: the anchor, then each by name."""
    hybrid = bool(sidecars) or NEWEST
    calls = ["__init__", "register_mem_pool_host"]
    calls += ["register_mem_host_pool_v2"] * (1 + len(sidecars)) if hybrid else []
    calls += ["on_host_pools_registered"] if NEWEST else []
    return calls


@pytest.mark.parametrize(("interface_v1", "suffix"), [(1, "_v1"), (0, "")])
@pytest.mark.parametrize(
    ("mem_layout", "io_backend"),
    [("layer_first", "kernel"), ("page_first", "kernel"), ("page_first_direct", "direct")],
)
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_one_round_trip_is_one_set_one_exists_and_one_get(
    kind: str,
    mem_layout: str,
    io_backend: str,
    interface_v1: int,
    suffix: str,
    real_cache: Callable[..., RealCache],
) -> None:
    spec = CacheSpec(kind=kind, mem_layout=mem_layout, io_backend=io_backend)
    cache = real_cache(spec, "dynamic", recorder(interface_v1=interface_v1))
    backend = RecordingBackend.latest
    assert cache.round_trip(cache.tokens(PAGES)).wrong_bytes == 0
    cache.detach()
    work = [f"batch_set{suffix}", "batch_exists", f"batch_get{suffix}"]
    assert backend.names() == [*attach_calls(), *work, "close"]


@pytest.mark.parametrize("sidecar", ["indexer", "swa", "mamba"])
def test_sidecar_pools_come_back_through_the_v2_calls(
    sidecar: str, real_cache: Callable[..., RealCache]
) -> None:
    if SGLANG == "0.5.10.post1" and sidecar != "mamba":
        pytest.skip("this version stores no such pool")
    kind = {"indexer": "dsa"}.get(sidecar, sidecar)
    spec = CacheSpec(kind=kind, mem_layout="page_first_direct", io_backend="direct")
    cache = real_cache(spec, "dynamic", recorder(interface_v1=1))
    backend = RecordingBackend.latest
    result = cache.round_trip(cache.tokens(PAGES))
    assert (result.pages_loaded, result.wrong_bytes) == (PAGES, 0)
    calls = backend.names()
    assert calls[: len(attach_calls(sidecar))] == attach_calls(sidecar)
    assert set(backend.pools) == {"kv", sidecar}
    assert {"batch_set_v2", "batch_exists_v2", "batch_get_v2"} <= set(calls)
    assert "batch_exists" not in calls


def test_get_and_set_arrive_128_pages_at_a_time_and_exists_does_where_kv_is_alone(
    real_cache: Callable[..., RealCache],
) -> None:
    pages = 130
    spec = CacheSpec(page_size=16, device_tokens=4096)
    cache = real_cache(spec, "dynamic", recorder(interface_v1=1))
    backend = RecordingBackend.latest
    assert cache.round_trip(cache.tokens(pages)).wrong_bytes == 0

    def sizes(call: str) -> list[int]:
        return [detail[0] for name, _, detail in backend.calls if name == call]

    assert sizes("batch_set_v1") == sizes("batch_get_v1") == [128, 2]
    assert sizes("batch_exists") == ([130] if NEWEST else [128, 2])


def test_clear_reaches_the_backend_and_close_ends_it(
    real_cache: Callable[..., RealCache],
) -> None:
    cache = real_cache(CacheSpec(), "dynamic", recorder(interface_v1=1))
    backend = RecordingBackend.latest
    cache.store(cache.tokens(PAGES))
    assert cache.cache.clear_storage_backend()
    cache.forget()
    assert cache.prefetch(cache.tokens(PAGES)) == 0
    cache.detach()
    assert backend.names()[-1] == "close"
    assert "clear" in backend.names()


@pytest.mark.skipif(not NEWEST, reason="SGLang's failure injector is newer")
@pytest.mark.parametrize("interface_v1", [0, 1])
def test_sglangs_failure_injector_wraps_a_dynamic_backend(
    interface_v1: int, monkeypatch: pytest.MonkeyPatch, real_cache: Callable[..., RealCache]
) -> None:
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "1.0")
    cache = real_cache(CacheSpec(), "dynamic", recorder(interface_v1=interface_v1))
    assert type(cache.backend).__name__ == "HiCacheStorageFailureInjector"
    result = cache.round_trip(cache.tokens(PAGES))
    assert (result.pages_written, result.pages_prefetched, result.wrong_bytes) == (0, 0, 0)
    cache.detach()
    assert RecordingBackend.latest.names() == [*attach_calls(), "close"]
