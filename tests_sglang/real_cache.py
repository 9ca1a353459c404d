"""Drives SGLang's own cache controllers through every tier on a CPU.

A process is one TP rank: the only one, or what its ``torch.distributed`` group says it is.

``RealCache`` holds a radix cache with its HiCache controller, host pools and storage
backend, all built by the installed ``sglang``. ``round_trip`` follows one request the way
the scheduler would: insert, write through to host, back up to storage, lose device and host
copies, prefetch, load back, and compare bytes. Memory that was given up is overwritten, so
what comes back can only have come from storage.
"""

from __future__ import annotations

import atexit
import json
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.distributed import parallel_state
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from torch import Tensor

import real_pools
from kv_pattern import device_parts, scrub_device, scrub_host
from real_pools import HAS_UNIFIED, UNIFIED_ONLY, CacheSpec

DEADLINE_S = 30.0
POLL_S = 0.002


class HiCacheTimeoutError(AssertionError):
    """SGLang did not report an event before the deadline."""


@dataclass(frozen=True)
class RoundTrip:
    """What one request did to the storage tier, in pages; ``wrong_bytes`` counts the bytes
    that differ from what was computed, missing pages included."""

    pages: int
    pages_written: int
    pages_prefetched: int
    pages_loaded: int
    wrong_bytes: int


def _backend_options(backend: str | None, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """SGLang prefetches nothing under 256 tokens unless told; the tests' requests are short."""
    if backend is None:
        return {"storage_backend": None, "extra_config": None}
    config = {"prefetch_threshold": 1, **(extra or {})}
    return {"storage_backend": backend, "extra_config": json.dumps(config)}


def _tp_rank_and_size() -> tuple[int, int]:
    """This process's; without process groups it becomes the only rank, and SGLang asks for
    groups even then."""
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), world_size=1, rank=0
        )
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _publish(server_args: ServerArgs, rank: int) -> None:
    """SGLang reads its flags and ranks from process-wide places."""
    set_global_server_args_for_scheduler(server_args)
    size = server_args.tp_size
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.init_distributed_environment(
            world_size=size, rank=rank, local_rank=rank, backend="gloo"
        )
        widths = {} if UNIFIED_ONLY else {"tensor_model_parallel_size": size}
        parallel_state.initialize_model_parallel(backend="gloo", **widths)
    if UNIFIED_ONLY:
        from sglang.srt.runtime_context import get_parallel

        get_parallel().override_permanently(tp_rank=rank, pp_rank=0, attn_dcp_rank=0)


def _component(name: str) -> Any:
    try:
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    except ImportError:
        from sglang.srt.mem_cache.unified_cache_components import ComponentType

    return ComponentType[name]


class RealCache:
    """SGLang's radix cache, controller and pools, with a storage backend attached."""

    def __init__(
        self,
        spec: CacheSpec,
        backend: str | None = None,
        extra_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.spec = spec
        storage = _backend_options(backend, extra_config)
        rank, self._ranks = _tp_rank_and_size()
        self.server_args = ServerArgs(
            model_path="dummy",
            tp_size=self._ranks,
            served_model_name=spec.model_name,
            device="cpu",
            page_size=spec.page_size,
            hicache_ratio=spec.host_ratio,
            hicache_mem_layout=spec.mem_layout,
            hicache_io_backend=spec.io_backend,
            hicache_write_policy=spec.write_policy,
            hicache_storage_backend=storage["storage_backend"],
            hicache_storage_backend_extra_config=storage["extra_config"],
            hicache_storage_prefetch_policy=spec.prefetch_policy,
        )
        self.server_args._mamba_cache_chunk_size = spec.page_size
        _publish(self.server_args, rank)
        self.device = real_pools.build_device_pools(spec)
        self.cache = self._build_cache()
        atexit.unregister(getattr(self.cache, "shutdown", None))
        self._backups: list[Any] = []
        self._requests = 0
        self._watch_backups()

    @property
    def unified(self) -> bool:
        """Whether this version gives this kind of model the unified tree."""
        return UNIFIED_ONLY or (HAS_UNIFIED and self.spec.kind in ("swa", "mamba"))

    @property
    def controller(self) -> Any:
        return self.cache.cache_controller

    @property
    def backend(self) -> Any:
        """The storage backend object SGLang made, or None while detached."""
        return self.controller.storage_backend

    @property
    def host_pools(self) -> dict[str, Any]:
        """Host pools by name; ``kv`` is the anchor."""
        group = self.controller.mem_pool_host
        if not hasattr(group, "entries"):
            return {"kv": group}
        return {entry.name.value: entry.host_pool for entry in group.entries}

    def _build_cache(self) -> Any:
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.device.req_to_token_pool,
            token_to_kv_pool_allocator=self.device.allocator,
            page_size=self.spec.page_size,
            tp_cache_group=torch.distributed.group.WORLD,
            enable_metrics=self.spec.enable_metrics,
        )
        if self.spec.kind == "swa":
            params.sliding_window_size = self.spec.page_size
        if self.spec.kind == "mamba":
            params.enable_mamba_extra_buffer = True
        if self.unified:
            return self._build_unified(params)
        if self.spec.kind == "mamba":
            from sglang.srt.mem_cache.hi_mamba_radix_cache import HiMambaRadixCache

            return HiMambaRadixCache(params=params, server_args=self.server_args)
        from sglang.srt.mem_cache.hiradix_cache import HiRadixCache

        return HiRadixCache(params=params, server_args=self.server_args)

    def _build_unified(self, params: CacheInitParams) -> Any:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        names = ["FULL", *{"swa": ["SWA"], "mamba": ["MAMBA"]}.get(self.spec.kind, [])]
        params.tree_components = tuple(_component(name) for name in names)
        cache = UnifiedRadixCache(params)
        cache.init_hicache(self.server_args, params)
        return cache

    def _watch_backups(self) -> None:
        """SGLang drops a backup's result after logging it; keep the operations to count."""
        original = self.controller._page_backup

        def page_backup(operation: Any) -> Any:
            self._backups.append(operation)
            return original(operation)

        self.controller._page_backup = page_backup

    def attach(self, backend: str, extra_config: Mapping[str, Any] | None = None) -> tuple[bool, str]:
        """Attach at run time, as the admin endpoint does."""
        storage = _backend_options(backend, extra_config)
        return self.cache.attach_storage_backend(
            storage["storage_backend"],
            storage["extra_config"],
            served_model_name=self.spec.model_name,
        )

    def detach(self) -> tuple[bool, str]:
        return self.cache.detach_storage_backend()

    def close(self) -> None:
        """Stop SGLang's storage threads, also where the tree itself refuses to detach."""
        if self.controller.storage_backend is not None:
            self.controller.detach_storage_backend()
            self.cache.enable_storage = False

    def wait(self, done: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
        """Poll SGLang's events, as the scheduler loop does, until ``done`` on every rank: each
        round has collectives in it, so all ranks must go through equally many."""
        limit = time.monotonic() + deadline_s
        while True:
            self.cache.check_hicache_events()
            if self._on_every_rank(done()):
                return
            if time.monotonic() > limit:
                raise HiCacheTimeoutError(f"{what} took more than {deadline_s} s")
            time.sleep(POLL_S)

    def _on_every_rank(self, done: bool) -> bool:
        if self._ranks == 1:
            return done
        everywhere = torch.tensor(int(done))
        torch.distributed.all_reduce(everywhere, op=torch.distributed.ReduceOp.MIN)
        return bool(everywhere)

    def tokens(self, pages: int, seed: int = 0) -> list[int]:
        """A deterministic token sequence of whole pages; different seeds share no prefix."""
        return [1 + (seed * 7919 + i * 31) % 50000 for i in range(pages * self.spec.page_size)]

    def store(self, tokens: Sequence[int]) -> int:
        """Prefill ``tokens`` and wait until every tier acknowledged; pages that reached L3."""
        self._backups.clear()
        indices = self._allocate(len(tokens))
        slot = self._allocate_state()
        for part in device_parts(self.spec, self.device, tokens, indices, slot, just_computed=True):
            part.fill()
        state = {} if slot is None else {"mamba_value": slot}
        result = self.cache.insert(InsertParams(key=self._key(tokens), value=indices, **state))
        if not self.unified:  # the unified tree frees what it had already, older ones do not
            self.device.allocator.free(indices[: result.prefix_len])
        self.wait(
            lambda: not self.cache.ongoing_write_through and not self.cache.ongoing_backup,
            "write-through and backup",
        )
        return sum(op.completed_tokens for op in self._backups) // self.spec.page_size

    def forget(self) -> None:
        """Evict everything from device and host, and overwrite that memory."""
        everything = EvictParams(
            num_tokens=self.spec.device_tokens,
            swa_num_tokens=self.spec.device_tokens,
            mamba_num=real_pools.MAMBA_SLOTS,
        )
        self.cache.evict(everything)
        self.cache.evict_host(self.controller.mem_pool_host.size)
        scrub_device(self.spec, self.device)
        for pool in self.host_pools.values():
            scrub_host(pool)

    def prefetch(self, tokens: Sequence[int]) -> int:
        """Ask for ``tokens`` as a waiting request does; pages that came from storage."""
        self._requests += 1
        request = self._request_id()
        match = self.cache.match_prefix(MatchPrefixParams(key=self._key(tokens)))
        matched = self._device_indices(match).numel() + match.host_hit_length
        node = match.last_host_node
        wanted = array("q", tokens[matched:]) if UNIFIED_ONLY else list(tokens[matched:])
        owner = self.cache if UNIFIED_ONLY else node
        args = (node,) if UNIFIED_ONLY else ()
        last_hash = owner.get_last_hash_value(*args)
        prefix_keys = None
        if self.cache.hicache_storage_pass_prefix_keys:
            args = (node,) if UNIFIED_ONLY else (node.parent,)
            prefix_keys = owner.get_prefix_hash_values(*args)
        self.cache.prefetch_from_storage(request, node, wanted, last_hash, prefix_keys)
        self.wait(lambda: self.cache.check_prefetch_progress(request), "prefetch")
        loaded = self.cache.pop_prefetch_loaded_tokens(request)
        return loaded // self.spec.page_size

    def load_back(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Bring the host hit to the device: (pages on the device, wrong bytes in them)."""
        key = MatchPrefixParams(key=self._key(tokens))
        match = self.cache.match_prefix(key)
        if match.host_hit_length:
            node = getattr(match, "best_match_node", match.last_host_node)
            self.cache.load_back(node)
            self.cache.ready_to_load_host_cache()
            self.wait(lambda: not self.cache.ongoing_load_back, "load back")
            match = self.cache.match_prefix(key)
        indices = self._device_indices(match)
        whole = len(indices) == len(tokens)
        slot = self._state_slot(match) if whole else None
        parts = device_parts(self.spec, self.device, tokens, indices, slot, just_computed=False)
        return len(indices) // self.spec.page_size, sum(part.wrong_bytes() for part in parts)

    def round_trip(self, tokens: Sequence[int]) -> RoundTrip:
        written = self.store(tokens)
        self.forget()
        on_device, _ = self.load_back(tokens)
        if on_device:
            raise AssertionError(f"{on_device} pages survived an eviction of every tier")
        prefetched = self.prefetch(tokens)
        loaded, wrong = self.load_back(tokens)
        return RoundTrip(
            pages=len(tokens) // self.spec.page_size,
            pages_written=written,
            pages_prefetched=prefetched,
            pages_loaded=loaded,
            wrong_bytes=wrong,
        )

    def _key(self, tokens: Sequence[int]) -> RadixKey:
        return RadixKey(array("q", tokens) if UNIFIED_ONLY else list(tokens))

    def _request_id(self) -> Any:
        name = f"request-{self._requests}"
        if not UNIFIED_ONLY:
            return name
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        return CacheRequestHandle(name, 0)

    def _allocate(self, count: int) -> Tensor:
        allocator = self.device.allocator
        if self.spec.kind != "swa":
            return allocator.alloc(count)
        indices = allocator.full_attn_allocator.alloc(count)
        window = allocator.swa_attn_allocator.alloc(count)
        allocator.full_to_swa_index_mapping[indices] = window
        return indices

    def _allocate_state(self) -> Tensor | None:
        if self.spec.kind != "mamba":
            return None
        requests = self.device.req_to_token_pool
        return getattr(requests, "mamba_allocator", requests.mamba_pool).alloc(1)

    def _device_indices(self, match: Any) -> Tensor:
        if UNIFIED_ONLY:
            return self.cache.path_device_indices(match.last_device_node)
        return match.device_indices

    def _state_slot(self, match: Any) -> Tensor | None:
        if self.spec.kind != "mamba":
            return None
        node = match.last_device_node
        if not HAS_UNIFIED:
            slot = node.mamba_value
        elif UNIFIED_ONLY:
            slot = self.cache.tree_core.get_component_device_value(node, _component("MAMBA"))
        else:
            slot = node.component_data[_component("MAMBA")].value
        if slot is None:
            raise AssertionError("a whole match of a Mamba request has no state on the device")
        return slot
