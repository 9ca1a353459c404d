"""SGLang's own device pools and allocators for tiny models, one builder per pool kind.

Sizes are small, but each pool has several layers, more than one head and more than one
page, so that a wrong stride, order or index cannot go unseen.
"""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from typing import Any, Literal

import torch
from sglang.srt.mem_cache import memory_pool

Kind = Literal["mha", "mla", "dsa", "swa", "mamba"]

UNIFIED_ONLY = importlib.util.find_spec("sglang.srt.mem_cache.hiradix_cache") is None
HAS_UNIFIED = importlib.util.find_spec("sglang.srt.mem_cache.unified_radix_cache") is not None

CONTEXT_LENGTH = 4096
FULL_LAYERS = [1, 3]
OTHER_LAYERS = [0, 2, 4]
MAMBA_SLOTS = 16


@dataclass(frozen=True)
class CacheSpec:
    """The model and HiCache options of one run; the names follow SGLang's flags."""

    kind: Kind = "mha"
    mem_layout: str = "layer_first"
    io_backend: str = "kernel"
    page_size: int = 64
    layers: int = 3
    heads: int = 2
    head_dim: int = 16
    device_tokens: int = 1024
    host_ratio: float = 4.0
    write_policy: str = "write_through"
    prefetch_policy: str = "wait_complete"
    model_name: str = "tests/tiny"
    dtype: torch.dtype = torch.bfloat16
    enable_metrics: bool = False
    latent: bool = False
    """The full-attention layers of a Mamba hybrid keep MLA latents instead of heads."""
    tp_rank: int = 0
    """Whose shard the bytes are where ranks hold different ones."""


@dataclass(frozen=True)
class DevicePools:
    kv_pool: Any
    allocator: Any
    req_to_token_pool: Any


def _call(factory: Any, **options: Any) -> Any:
    """Versions drop and add keywords; pass the ones this one knows."""
    known = inspect.signature(factory).parameters
    return factory(**{name: value for name, value in options.items() if name in known})


def build_device_pools(spec: CacheSpec) -> DevicePools:
    common = {
        "size": spec.device_tokens,
        "page_size": spec.page_size,
        "dtype": spec.dtype,
        "device": "cpu",
        "enable_memory_saver": False,
        "enable_kvcache_transpose": False,
    }
    heads = {"head_num": spec.heads, "head_dim": spec.head_dim}
    latent = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "layer_num": spec.layers}
    requests = memory_pool.ReqToTokenPool(
        size=8, max_context_len=CONTEXT_LENGTH, device="cpu", enable_memory_saver=False
    )
    match spec.kind:
        case "mha":
            pool = _call(memory_pool.MHATokenToKVPool, **common, **heads, layer_num=spec.layers)
        case "mla":
            pool = _call(memory_pool.MLATokenToKVPool, **common, **latent)
        case "dsa":
            sparse = getattr(memory_pool, "DSATokenToKVPool", None) or memory_pool.NSATokenToKVPool
            dims = {"index_head_dim": 128, "kv_cache_dim": 80}
            pool = _call(sparse, **common, **latent, **dims)
        case "swa":
            return _swa_pools(spec, common, heads, requests)
        case "mamba":
            return _mamba_pools(spec, common, {**heads, **_latent_layers(spec, latent)})
    return DevicePools(pool, _paged_allocator(spec, pool), requests)


def _paged_allocator(spec: CacheSpec, pool: Any) -> Any:
    from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

    return PagedTokenToKVPoolAllocator(
        size=spec.device_tokens,
        page_size=spec.page_size,
        dtype=spec.dtype,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )


def _swa_pools(spec: CacheSpec, common: dict[str, Any], heads: dict[str, int], requests: Any) -> DevicePools:
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    try:
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    except ImportError:
        from sglang.srt.mem_cache.swa_memory_pool import SWATokenToKVPoolAllocator

    layers = {"swa_attention_layer_ids": OTHER_LAYERS, "full_attention_layer_ids": FULL_LAYERS}
    accepted = {k: v for k, v in common.items() if k in inspect.signature(SWAKVPool).parameters}
    pool = SWAKVPool(size_swa=spec.device_tokens, **accepted, **heads, **layers)
    allocator = SWATokenToKVPoolAllocator(
        size=spec.device_tokens,
        size_swa=spec.device_tokens,
        page_size=spec.page_size,
        dtype=spec.dtype,
        device="cpu",
        kvcache=pool,
        need_sort=False,
    )
    return DevicePools(pool, allocator, requests)


def _latent_layers(spec: CacheSpec, latent: dict[str, int]) -> dict[str, int]:
    if not spec.latent:
        return {}
    return {"use_mla": True, **{name: latent[name] for name in ("kv_lora_rank", "qk_rope_head_dim")}}


def _mamba_pools(spec: CacheSpec, common: dict[str, Any], layers: dict[str, int]) -> DevicePools:
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape

    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=32,
        n_groups=1,
        num_heads=2,
        head_dim=16,
        state_size=16,
        conv_kernel=4,
    )
    requests = _call(
        memory_pool.HybridReqToTokenPool,
        size=8,
        mamba_size=MAMBA_SLOTS,
        mamba_spec_state_size=8,
        max_context_len=CONTEXT_LENGTH,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=OTHER_LAYERS),
        mamba_layer_ids=OTHER_LAYERS,
        enable_mamba_extra_buffer=True,
    )
    pool = _call(
        memory_pool.HybridLinearKVPool,
        **common,
        **layers,
        full_attention_layer_ids=FULL_LAYERS,
        mamba_pool=requests.mamba_pool,
    )
    return DevicePools(pool, _paged_allocator(spec, pool), requests)
