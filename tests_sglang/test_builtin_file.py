"""The harness against SGLang's built-in ``file`` backend: what it proves when nothing is ours."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from real_cache import RealCache
from real_pools import CacheSpec

SGLANG = version("sglang")
PAGES = 5

LAYOUTS = (
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
)
KINDS = ("mha", "mla", "dsa", "swa", "mamba")


def unsupported(kind: str, mem_layout: str) -> str | None:
    """Why this version has no such host pool; None when it has."""
    if kind == "swa" and SGLANG == "0.5.10.post1":
        return "HiCache has no sliding-window pool in this version"
    if mem_layout == "page_head" and kind in ("mla", "dsa", "mamba"):
        return "page_head exists for pools with heads only"
    if kind == "mamba" and SGLANG == "0.5.14" and mem_layout != "page_first_direct":
        return "the Mamba host pool takes page_first_direct only in this version"
    if kind == "mamba" and SGLANG == "0.5.23" and mem_layout == "layer_first":
        return "the Mamba host pool takes page-first layouts only in this version"
    return None


def cases() -> list[object]:
    found = []
    for kind in KINDS:
        for mem_layout, io_backend in LAYOUTS:
            marks = []
            if unsupported(kind, mem_layout):
                reason = unsupported(kind, mem_layout)
                marks.append(
                    pytest.mark.xfail(raises=(ValueError, AssertionError), reason=reason, strict=True)
                )
            elif kind == "dsa" and SGLANG == "0.5.10.post1":
                reason = "this version's storage path leaves the indexer out"
                marks.append(pytest.mark.xfail(raises=WrongBytesError, reason=reason, strict=True))
            name = f"{kind}-{mem_layout}-{io_backend}"
            found.append(pytest.param(kind, mem_layout, io_backend, marks=marks, id=name))
    return found


class WrongBytesError(AssertionError):
    """KV came back from storage, and it was not what was computed."""


@pytest.mark.parametrize(("kind", "mem_layout", "io_backend"), cases())
def test_kv_evicted_from_device_and_host_comes_back_from_storage_unchanged(
    kind: str,
    mem_layout: str,
    io_backend: str,
    storage_dir: Path,
    real_cache: Callable[..., RealCache],
) -> None:
    spec = CacheSpec(kind=kind, mem_layout=mem_layout, io_backend=io_backend)
    cache = real_cache(spec, "file")
    result = cache.round_trip(cache.tokens(PAGES))
    assert result.pages_written == result.pages_prefetched == result.pages_loaded == PAGES
    if result.wrong_bytes:
        raise WrongBytesError(f"{result.wrong_bytes} bytes")


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_a_page_altered_on_disk_shows_as_wrong_bytes(
    kind: str, storage_dir: Path, real_cache: Callable[..., RealCache]
) -> None:
    cache = real_cache(CacheSpec(kind=kind), "file")
    tokens = cache.tokens(PAGES)
    cache.store(tokens)
    cache.forget()
    page = next(storage_dir.glob("*.bin"))
    content = bytearray(page.read_bytes())
    content[7] ^= 0xFF
    page.write_bytes(content)
    assert cache.prefetch(tokens) == PAGES
    assert cache.load_back(tokens) == (PAGES, 1)


def test_a_page_missing_in_the_middle_ends_the_prefix_there(
    storage_dir: Path, real_cache: Callable[..., RealCache]
) -> None:
    cache = real_cache(CacheSpec(), "file")
    head, whole = cache.tokens(2), cache.tokens(PAGES)
    cache.store(head)
    kept = set(storage_dir.glob("*.bin"))
    cache.store(whole)
    third = min(set(storage_dir.glob("*.bin")) - kept, key=lambda page: page.stat().st_mtime_ns)
    cache.forget()
    third.unlink()
    assert cache.prefetch(whole) == 2
    assert cache.load_back(whole) == (2, 0)


def test_another_cache_restores_what_the_first_one_stored(
    storage_dir: Path, real_cache: Callable[..., RealCache]
) -> None:
    first = real_cache(CacheSpec(), "file")
    tokens = first.tokens(PAGES)
    first.store(tokens)
    second = real_cache(CacheSpec(), "file")
    assert second.prefetch(tokens) == PAGES
    assert second.load_back(tokens) == (PAGES, 0)


def test_more_pages_than_one_batch_come_back_unchanged(
    storage_dir: Path, real_cache: Callable[..., RealCache]
) -> None:
    pages = 130  # SGLang asks for 128 at a time
    spec = CacheSpec(page_size=16, device_tokens=4096)
    result = (cache := real_cache(spec, "file")).round_trip(cache.tokens(pages))
    assert (result.pages_written, result.pages_loaded, result.wrong_bytes) == (pages, pages, 0)


def test_a_detached_backend_is_not_asked_and_works_again_once_attached(
    storage_dir: Path, real_cache: Callable[..., RealCache]
) -> None:
    cache = real_cache(CacheSpec(), "file")
    tokens = cache.tokens(PAGES)
    cache.store(tokens)
    cache.forget()
    attached, message = cache.detach()
    assert attached, message
    assert cache.prefetch(tokens) == 0
    attached, message = cache.attach("file")
    assert attached, message
    assert cache.prefetch(tokens) == PAGES
    assert cache.load_back(tokens) == (PAGES, 0)


def test_a_cache_without_a_backend_forgets_for_good(
    real_cache: Callable[..., RealCache],
) -> None:
    cache = real_cache(CacheSpec())
    result = cache.round_trip(cache.tokens(PAGES))
    assert (result.pages_written, result.pages_prefetched, result.pages_loaded) == (0, 0, 0)
