"""What a backend owes SGLang's real controllers, asked of any one of them.

``pytest tests_sglang/test_any_backend.py --backend s3 --set bucket=kv --set endpoint=http://127.0.0.1:9000``
runs it on a store that is there already; ``{tmp}`` in a value is a fresh directory. A plugin's own
tests start its server and run this file in SGLang's environment.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from real_cache import RealCache
from real_pools import CacheSpec
from test_adapter import combinations, ours

PAGES = 5


@pytest.fixture
def spec() -> CacheSpec:
    """A deployment whose pages nobody has stored before."""
    return CacheSpec(model_name=f"tests/{uuid.uuid4().hex}")


@pytest.mark.parametrize(("kind", "mem_layout", "io_backend"), combinations())
def test_every_pool_and_layout_comes_back_byte_for_byte(
    kind: str,
    mem_layout: str,
    io_backend: str,
    spec: CacheSpec,
    any_backend: dict[str, Any],
    real_cache: Callable[..., RealCache],
) -> None:
    spec = replace(spec, kind=kind, mem_layout=mem_layout, io_backend=io_backend)
    cache = real_cache(spec, "dynamic", ours(**any_backend))
    result = cache.round_trip(cache.tokens(PAGES))
    assert result.pages_written == result.pages_prefetched == result.pages_loaded == PAGES
    assert result.wrong_bytes == 0


def test_a_second_server_finds_what_the_first_one_stored(
    spec: CacheSpec, any_backend: dict[str, Any], real_cache: Callable[..., RealCache]
) -> None:
    first = real_cache(spec, "dynamic", ours(**any_backend))
    second = real_cache(spec, "dynamic", ours(**any_backend))
    tokens = first.tokens(PAGES)
    assert first.store(tokens) == PAGES
    assert second.prefetch(tokens) == PAGES
    assert second.load_back(tokens) == (PAGES, 0)


def test_a_request_gets_the_prefix_that_was_stored_and_no_more(
    spec: CacheSpec, any_backend: dict[str, Any], real_cache: Callable[..., RealCache]
) -> None:
    cache = real_cache(spec, "dynamic", ours(**any_backend))
    tokens = cache.tokens(PAGES)
    assert cache.store(tokens[: 3 * spec.page_size]) == 3
    cache.forget()
    assert cache.prefetch(tokens) == 3
    assert cache.load_back(tokens) == (3, 0)


def test_another_model_never_hits(
    spec: CacheSpec, any_backend: dict[str, Any], real_cache: Callable[..., RealCache]
) -> None:
    first = real_cache(spec, "dynamic", ours(**any_backend))
    tokens = first.tokens(PAGES)
    first.store(tokens)
    second = real_cache(replace(spec, model_name=spec.model_name + "-other"), "dynamic", ours(**any_backend))
    assert second.prefetch(tokens) == 0


def test_pages_are_there_after_a_detach_and_an_attach(
    spec: CacheSpec, any_backend: dict[str, Any], real_cache: Callable[..., RealCache]
) -> None:
    cache = real_cache(spec, "dynamic", ours(**any_backend))
    tokens = cache.tokens(PAGES)
    cache.store(tokens)
    detached, message = cache.detach()
    assert detached, message
    attached, message = cache.attach("dynamic", ours(**any_backend))
    assert attached, message
    cache.forget()
    assert cache.prefetch(tokens) == PAGES
    assert cache.load_back(tokens) == (PAGES, 0)
