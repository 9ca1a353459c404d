"""A dict behind every call SGLang makes to a dynamic backend, in the order it made them."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransferResult


class RecordingBackend(HiCacheStorage):
    """Loaded by SGLang as ``dynamic``. Uses the zero-copy addresses where the host pool has
    them and flat pages where it has not, as an adapter would."""

    latest: RecordingBackend

    def __init__(self, storage_config: Any, kwargs: Any) -> None:
        self.config = storage_config
        self.calls: list[tuple[str, str, Any]] = []
        self.pages: dict[str, bytes] = {}
        self.pools: dict[str, Any] = {}
        self.refused_addresses: set[str] = set()
        type(self).latest = self
        self._record("__init__", dict(kwargs))

    def _record(self, call: str, detail: Any = None) -> None:
        self.calls.append((call, threading.current_thread().name, detail))

    def names(self) -> list[str]:
        return [call for call, _, _ in self.calls]

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self._record("register_mem_pool_host", type(mem_pool_host).__name__)
        self.pools["kv"] = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        name = str(getattr(host_pool_name, "value", host_pool_name))
        self._record("register_mem_host_pool_v2", (name, type(host_pool).__name__))
        self.pools[name] = host_pool

    def on_host_pools_registered(self) -> None:
        self._record("on_host_pools_registered")

    def _buffers(self, pool: str, indices: torch.Tensor) -> list[tuple[int, int]] | None:
        try:
            addresses, sizes = self.pools[pool].get_page_buffer_meta(indices)
        except (ValueError, NotImplementedError, AttributeError):
            self.refused_addresses.add(pool)
            return None
        return list(zip(addresses, sizes, strict=True))

    def _page(self, pool: str, keys: Sequence[str], indices: torch.Tensor, number: int) -> Any:
        size = len(indices) // len(keys)
        return indices[number * size : (number + 1) * size]

    def _write(self, pool: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        for number, key in enumerate(keys):
            page = self._page(pool, keys, indices, number)
            buffers = self._buffers(pool, page)
            if buffers is None:
                flat = self.pools[pool].get_data_page(int(page[0]), flat=True)
                content = flat.contiguous().view(torch.uint8).numpy().tobytes()
            else:
                content = b"".join(ctypes.string_at(at, size) for at, size in buffers)
            self.pages[f"{key}.{pool}"] = content
        return [True] * len(keys)

    def _read(self, pool: str, keys: Sequence[str], indices: torch.Tensor) -> list[bool]:
        found = []
        for number, key in enumerate(keys):
            content = self.pages.get(f"{key}.{pool}")
            found.append(content is not None)
            if content is None:
                continue
            page = self._page(pool, keys, indices, number)
            buffers = self._buffers(pool, page)
            if buffers is None:
                target = self.pools[pool].get_dummy_flat_data_page()
                bytes_ = torch.frombuffer(bytearray(content), dtype=torch.uint8)
                self.pools[pool].set_from_flat_data_page(int(page[0]), bytes_.view(target.dtype))
                continue
            offset = 0
            for at, size in buffers:
                ctypes.memmove(at, content[offset : offset + size], size)
                offset += size
        return found

    def batch_exists(self, keys: Any, extra_info: Any = None) -> int:
        self._record("batch_exists", (len(keys), extra_info))
        return self._leading(keys, "kv")

    def _leading(self, keys: Sequence[str], pool: str) -> int:
        for number, key in enumerate(keys):
            if f"{key}.{pool}" not in self.pages:
                return number
        return len(keys)

    def batch_exists_v2(
        self, keys: Any, pool_transfers: Any = None, extra_info: Any = None
    ) -> PoolTransferResult:
        self._record("batch_exists_v2", (len(keys), pool_transfers, extra_info))
        restorable = list(range(1, self._leading(keys, "kv") + 1))
        hits = {"kv": len(restorable)}
        for transfer in pool_transfers or []:
            name = transfer.name.value
            trailing = transfer.hit_policy.value == "trailing_pages"
            window = max(1, len(transfer.keys or ())) if trailing else len(keys)
            restorable = [
                end
                for end in restorable
                if all(f"{key}.{name}" in self.pages for key in keys[max(0, end - window) : end])
            ]
            hits[name] = max(restorable, default=0)
        result = PoolTransferResult(max(restorable, default=0), hits)
        result.restorable_prefix_pages = restorable
        return result

    def batch_get_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._record("batch_get_v1", (len(keys), host_indices, extra_info))
        return self._read("kv", keys, host_indices)

    def batch_set_v1(self, keys: Any, host_indices: Any, extra_info: Any = None) -> list[bool]:
        self._record("batch_set_v1", (len(keys), host_indices, extra_info))
        return self._write("kv", keys, host_indices)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        self._record("batch_get_v2", (transfers, extra_info))
        return {t.name: self._read(t.name.value, t.keys, t.host_indices) for t in transfers}

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[str, list[bool]]:
        self._record("batch_set_v2", (transfers, extra_info))
        return {t.name: self._write(t.name.value, t.keys, t.host_indices) for t in transfers}

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        raise AssertionError("SGLang calls the batch methods only")

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        self._record("batch_get", (len(keys), target_locations, target_sizes))
        stored = [self.pages.get(f"{key}.kv") for key in keys]
        return [
            None
            if content is None
            else torch.frombuffer(bytearray(content), dtype=torch.uint8).view(target.dtype)
            for content, target in zip(stored, target_locations, strict=True)
        ]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        raise AssertionError("SGLang calls the batch methods only")

    def batch_set(
        self,
        keys: Any,
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        self._record("batch_set", (len(keys), values, target_locations))
        for key, value in zip(keys, values, strict=True):
            self.pages[f"{key}.kv"] = value.contiguous().view(torch.uint8).numpy().tobytes()
        return True

    def exists(self, key: str) -> bool:
        raise AssertionError("SGLang calls the batch methods only")

    def clear(self) -> None:
        self._record("clear")
        self.pages.clear()

    def get_stats(self) -> None:
        self._record("get_stats")

    def close(self) -> None:
        self._record("close")
