"""The bytes a test puts into device KV, and whether they came back.

The pattern follows from the tokens alone, so any process, version or layout that computed
the same tokens expects the same bytes. Where SGLang shards a pool over TP ranks, the rank is
part of it too, so a page that went to the wrong rank shows.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from torch import Tensor

from real_pools import CacheSpec, DevicePools

SCRUBBED = 77


@dataclass(frozen=True)
class Part:
    """Rows of one device buffer and what a computed prefix would have put there."""

    rows: Tensor
    buffer: Tensor
    expected: Tensor

    def fill(self) -> None:
        self.buffer[self.rows] = self.expected.view(self.buffer.dtype)

    def wrong_bytes(self) -> int:
        return int((self.buffer[self.rows].view(torch.uint8) != self.expected).sum())


def _page_seeds(tokens: Sequence[int], page_size: int, shard: int) -> list[int]:
    """One seed per page, from all the tokens up to its end: what a page holds depends on its
    prefix and not on what follows."""
    seeds, seed = [], shard
    for end in range(page_size, len(tokens) + 1, page_size):
        seed = zlib.crc32(array("q", tokens[end - page_size : end]).tobytes(), seed)
        seeds.append(seed)
    return seeds


def _pattern(buffer: Tensor, seeds: Sequence[int], number: int, rows_per_page: int) -> Tensor:
    row = (*buffer.shape[1:-1], buffer.shape[-1] * buffer.element_size())
    pages = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed * 1000 + number)
        shape = (rows_per_page, *row)
        pages.append(torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8))
    return torch.cat(pages) if pages else torch.empty((0, *row), dtype=torch.uint8)


def token_buffers(kv_pool: Any) -> list[Tensor]:
    """Per-layer buffers with one row per token slot."""
    if hasattr(kv_pool, "kv_buffer"):
        return list(kv_pool.kv_buffer)
    return [*kv_pool.k_buffer, *kv_pool.v_buffer]


def device_parts(
    spec: CacheSpec,
    pools: DevicePools,
    tokens: Sequence[int],
    indices: Tensor,
    state_slot: Tensor | None,
    *,
    just_computed: bool,
) -> Iterator[Part]:
    """All device memory of the prefix of ``tokens`` that lies in the slots ``indices``.

    A prefix that came back has the last window only in a sliding-window pool; one just
    computed has all of it. A state pool has the state after the last token.
    """
    page_size = spec.page_size
    pages = len(indices) // page_size
    seeds = _page_seeds(tokens, page_size, spec.tp_rank)[:pages]
    kv_pool = pools.kv_pool
    full = getattr(kv_pool, "full_kv_pool", kv_pool)
    replicated = isinstance(full, MLATokenToKVPool)
    full_seeds = _page_seeds(tokens, page_size, 0)[:pages] if replicated else seeds
    for number, buffer in enumerate(token_buffers(full)):
        yield Part(indices, buffer, _pattern(buffer, full_seeds, number, page_size))
    for number, buffer in enumerate(getattr(kv_pool, "index_k_with_scale_buffer", ())):
        rows = indices[::page_size] // page_size
        yield Part(rows, buffer, _pattern(buffer, full_seeds, 100 + number, 1))
    if spec.kind == "swa":
        window = seeds if just_computed else seeds[-1:]
        slots = indices[len(indices) - len(window) * page_size :]
        rows = pools.allocator.translate_loc_from_full_to_swa(slots).long()
        for number, buffer in enumerate(token_buffers(kv_pool.swa_kv_pool)):
            yield Part(rows, buffer, _pattern(buffer, window, 200 + number, page_size))
    if state_slot is not None:
        state = pools.req_to_token_pool.mamba_pool.mamba_cache
        layers = [layer for buffer in (state.temporal, *state.conv) for layer in buffer]
        for number, buffer in enumerate(layers):
            yield Part(state_slot, buffer, _pattern(buffer, seeds[-1:], 300 + number, 1))


def scrub_device(spec: CacheSpec, pools: DevicePools) -> None:
    kv_pool = pools.kv_pool
    tensors = token_buffers(getattr(kv_pool, "full_kv_pool", kv_pool))
    tensors.extend(getattr(kv_pool, "index_k_with_scale_buffer", ()))
    if spec.kind == "swa":
        tensors.extend(token_buffers(kv_pool.swa_kv_pool))
    if spec.kind == "mamba":
        state = pools.req_to_token_pool.mamba_pool.mamba_cache
        tensors.extend((state.temporal, *state.conv))
    for tensor in tensors:
        tensor.fill_(SCRUBBED)


def host_tensors(host_pool: Any) -> list[Tensor]:
    """All the memory of a host pool, whatever it calls it."""
    found: list[Tensor] = []
    for name in ("kv_buffer", "index_k_with_scale_buffer", "temporal_buffer", "conv_buffer"):
        value = getattr(host_pool, name, None)
        if isinstance(value, Tensor):
            found.append(value)
        elif value is not None:
            found.extend(value)
    return found


def scrub_host(host_pool: Any) -> None:
    for tensor in host_tensors(host_pool):
        tensor.fill_(SCRUBBED)
