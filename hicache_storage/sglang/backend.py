"""HiCacheBackend: what SGLang loads with ``--hicache-storage-backend dynamic``.

Three interface generations meet here and become one page path: names and pages in, statuses out.

==========  ==========================================  ==============================
generation  calls                                       pages
==========  ==========================================  ==============================
generic     get, set, batch_get, batch_set              SGLang's tensors, copied
v1          batch_get_v1, batch_set_v1                  host pool memory, zero copy
v2          batch_exists_v2, batch_get_v2, batch_set_v2  any named pool, zero copy
==========  ==========================================  ==============================

SGLang takes any truthy element of an answer for a success and a short list for a total loss, so
every answer has exactly one bool a key. Nothing raises into its threads: an exception there is a
lost prefetch at best and a dead thread at worst (sglang issue 38428). Only construction and
registration raise, which fails the attach cleanly and tells the operator why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache import hicache_storage as sgl

from hicache_storage.errors import SettingsError, StorageError, UnsupportedError
from hicache_storage.hybrid import HitPolicy, PoolPresence, leading_run, restorable_prefixes
from hicache_storage.layers.head_slices import HeadSlicesLayer
from hicache_storage.layers.layer import find_layer
from hicache_storage.layers.metrics import MetricsLayer
from hicache_storage.open import check_settings, open_storage
from hicache_storage.sglang.answers import answers, no_page, no_pool, no_tensor
from hicache_storage.sglang.identity import head_slices, is_replicated, pool_namespace
from hicache_storage.sglang.pool_pages import PoolPages, tensor_pages
from hicache_storage.sglang.report import startup_report
from hicache_storage.storage import HiCacheStorage, Status

logger = logging.getLogger(__name__)

OURS = ("backend_name", "module_path", "class_name", "interface_v1")
SGLANGS = (
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
)
"""Keys of extra_config that are for SGLang itself; some versions leave them in."""

KV = "kv"


class HiCacheBackend(sgl.HiCacheStorage):  # type: ignore[misc]
    """Any backend of this package, installed plugin or ``module:Class``, as SGLang sees it.

    Calls come from SGLang's query, prefetch and backup threads at once. Registration and close
    happen while none of those run.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        """Checks the settings; the store is opened when the host pool, and so the identity, is known.

        Raises SettingsError naming the key that is unknown, missing or wrong.
        """
        del kwargs  # the factory passes what it did not use
        extra = dict(storage_config.extra_config or {})
        self._config = storage_config
        if "backend_name" not in extra:
            raise SettingsError("extra_config lacks backend_name: an installed backend, or module:Class")
        self._backend = str(extra["backend_name"])
        self._interface_v1 = bool(extra.get("interface_v1", 0))
        self._settings = {k: v for k, v in extra.items() if k not in OURS + SGLANGS}
        self._storage: HiCacheStorage | None = None
        self._pools: dict[str, PoolPages] = {}
        check_settings(self._backend, self._settings)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store for this pool's pages and register its memory. Raises StorageError."""
        super().register_mem_pool_host(mem_pool_host)
        anchor = getattr(mem_pool_host, "anchor_entry", None)
        pool = mem_pool_host if anchor is None else anchor.host_pool
        self.close()
        if hasattr(pool, "index_k_with_scale_buffer"):
            raise SettingsError(
                f"{type(pool).__name__} leaves its index out of what it stores, so prefixes would come back "
                "wrong (SGLang 0.5.10); run this model with SGLang 0.5.14 or newer, or without L3"
            )
        logical = getattr(pool, "kv_buffer", True) is None  # it counts tokens; only sidecars have bytes
        nbytes = 0 if logical else PoolPages.nbytes_of(pool)
        replicated = is_replicated(self._config, KV, pool)
        slices = head_slices(self._config, pool, replicated)
        namespace = pool_namespace(self._config, pool, nbytes, replicated, slices)
        self._storage = open_storage(self._backend, self._settings, namespace)
        try:
            if nbytes:
                kv = self._storage
                if slices:
                    kv = HeadSlicesLayer(kv, slices, self._config.tp_lcm_size)
                self._pools[KV] = PoolPages(kv, pool, suffix="")
        except BaseException:
            self.close()
            raise
        report = startup_report(self._backend, self._storage, self._pools.get(KV), self._interface_v1)
        for level, line in report:
            logger.log(level, "hicache-storage: %s", line)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Register a sidecar pool; the anchor comes again under the name "kv" and is known.

        Does not raise: up to 0.5.14 SGLang's threads run already and its rollback is behind it. A
        pool that cannot be registered holds nothing, so prefixes that need it are misses.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = _name(host_pool_name)
        if name == KV:
            return
        try:
            self._register_sidecar(name, host_pool)
        except Exception:
            logger.exception("hicache-storage: pool %s cannot be used; its pages are misses", name)

    def _register_sidecar(self, name: str, host_pool: Any) -> None:
        storage = self._open
        if name == "mamba" and self._config.tp_size > 1 and not hasattr(self._config, "attn_cp_size"):
            raise SettingsError(
                "SGLang 0.5.10 does not make ranks agree on the states they loaded, so one unreadable state "
                "hangs the server; run hybrid models with SGLang 0.5.14 or newer, or with one rank"
            )
        replicated = is_replicated(self._config, name, host_pool)
        identity = pool_namespace(self._config, host_pool, PoolPages.nbytes_of(host_pool), replicated)
        pages = PoolPages(storage, host_pool, suffix=f".{name}.{identity.digest[:12]}")
        stale = self._pools.get(name)
        self._pools[name] = pages
        if stale is not None:
            stale.close()
        logger.info("hicache-storage: pool %s, %s", name, pages)

    @answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return leading_run(self._kv.batch_exists(keys))

    @answers(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._kv.exists(key)

    @answers(no_page)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._get(KV, keys, host_indices)

    @answers(no_page)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        return self._set(KV, keys, host_indices)

    @answers(lambda *_, **__: sgl.PoolTransferResult.empty())
    def batch_exists_v2(
        self, keys: list[str], pool_transfers: list[Any] | None = None, extra_info: Any = None
    ) -> Any:
        """The prefixes that KV and every sidecar pool can restore together."""
        kv_pages = leading_run(self._kv.batch_exists(keys)) if KV in self._pools else len(keys)
        pools = [self._presence(transfer, keys[:kv_pages]) for transfer in pool_transfers or []]
        found = restorable_prefixes(kv_pages, pools)
        boundaries: dict[Any, int] = {KV: kv_pages, **found.boundaries}
        hits = {name: pages for name, pages in boundaries.items() if pages}
        if "restorable_prefix_pages" in sgl.PoolTransferResult.__dataclass_fields__:
            return sgl.PoolTransferResult(found.longest, hits, list(found.prefixes))
        return sgl.PoolTransferResult(found.longest, hits)

    @answers(no_pool)
    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: self._get(_name(t.name), t.keys or [], t.host_indices) for t in transfers}

    @answers(no_pool)
    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        return {t.name: self._set(_name(t.name), t.keys or [], t.host_indices) for t in transfers}

    @answers(lambda *_, **__: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    @answers(no_tensor)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        statuses = tensor_pages(self._pools[KV], keys, list(target_locations), write=False)
        return [tensor if status else None for tensor, status in zip(target_locations, statuses, strict=True)]

    @answers(lambda *_, **__: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    @answers(lambda *_, **__: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return all(tensor_pages(self._pools[KV], keys, list(values), write=True))

    @answers(lambda *_, **__: False)
    def clear(self) -> bool:
        """Remove this deployment's pages, and nobody else's."""
        try:
            self._open.clear()
        except UnsupportedError as error:
            logger.warning("hicache-storage: nothing was cleared: %s", error)
            return False
        return True

    @answers(lambda *_, **__: None)
    def get_stats(self) -> Any:
        """SGLang's StorageMetrics since the last call: pages, and GB/s (10^9 bytes) per batch."""
        metrics = None if self._storage is None else find_layer(self._storage, MetricsLayer)
        if metrics is None:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        stats = StorageMetrics()
        for transfer in metrics.take():
            pages, rates = (
                (stats.prefetch_pgs, stats.prefetch_bandwidth)
                if transfer.op == "get"
                else (stats.backup_pgs, stats.backup_bandwidth)
            )
            pages.append(transfer.pages)
            rates.append(transfer.nbytes / max(transfer.seconds, 1e-9) / 1e9)
        return stats

    @answers(lambda *_, **__: None)
    def close(self) -> None:
        """Unregister L2 and release the store; safe to call twice, and to register again after."""
        pools, self._pools = self._pools, {}
        storage, self._storage = self._storage, None
        try:
            for pages in pools.values():
                pages.close()
        finally:
            if storage is not None:
                storage.close()

    @property
    def _open(self) -> HiCacheStorage:
        if self._storage is None:
            raise StorageError("no host pool is registered, so there is no store yet")
        return self._storage

    @property
    def _kv(self) -> HiCacheStorage:
        """The store as KV's pages are kept in it."""
        return self._pools[KV].storage if KV in self._pools else self._open

    def _get(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        return _bools(self._pools[name].get(keys, host_indices)) if self._has(name) else [False] * len(keys)

    def _set(self, name: str, keys: Sequence[str], host_indices: Any) -> list[bool]:
        return _bools(self._pools[name].set(keys, host_indices)) if self._has(name) else [False] * len(keys)

    def _has(self, name: str) -> bool:
        if name in self._pools:
            return True
        logger.error("hicache-storage: pool %r was never registered; its pages are misses", name)
        return False

    def _presence(self, transfer: Any, keys: Sequence[str]) -> PoolPresence:
        name = _name(transfer.name)
        policy = HitPolicy(getattr(transfer.hit_policy, "value", transfer.hit_policy))
        asked = list(transfer.keys or []) if policy is HitPolicy.BLOCK_GROUPS else keys
        present: Sequence[bool] = [False] * len(asked)
        if self._has(name):
            present = self._open.batch_exists(self._pools[name].names(asked))
        return PoolPresence(
            transfer.name,
            policy,
            present,
            window=len(transfer.keys or []) or 1,
            block_pages=getattr(transfer, "block_pages", 0),
            group_pages=getattr(transfer, "group_pages", 0),
        )


def _bools(statuses: Sequence[Status]) -> list[bool]:
    return [bool(status) for status in statuses]


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))
