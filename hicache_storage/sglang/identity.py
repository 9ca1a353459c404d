"""The Namespace of an SGLang deployment, put together from what SGLang says and what it does not.

``HiCacheStorageConfig`` names model and ranks; dtype, layout and geometry are read from the host
pool. Fields that a version lacks (attn_cp_*, dcp_* before 0.5.11) count as absent.
"""

from __future__ import annotations

from typing import Any

from hicache_storage.errors import SettingsError
from hicache_storage.namespace import Namespace
from hicache_storage.sglang.server import server_args

AXES = {
    ("mha", "layer_first"): "kv,layer,token,head,dim",
    ("mha", "page_first_direct"): "kv,layer,token,head,dim",
    ("mha", "page_first"): "kv,token,layer,head,dim",
    ("mha", "page_head"): "kv,head,token,layer,dim",
    ("mla", "layer_first"): "layer,token,dim",
    ("mla", "page_first_direct"): "layer,token,dim",
    ("mla", "page_first"): "token,layer,dim",
}
"""Order of the stored bytes by layout: ``layer_first`` and ``page_first_direct`` share pages."""


WHOLE = range(0)
"""No slices: a page is one object."""


def pool_namespace(
    config: Any, pool: Any, page_nbytes: int, replicated: bool, slices: range = WHOLE
) -> Namespace:
    """Whose pages a pool's are.

    ``replicated``: the bytes are the same on every TP rank, so the TP rank is no part of them. Nor is it
    where pages are kept by ``slices`` of heads; they are the pages then.
    """
    objects = max(1, len(slices))
    attention = _attention(pool)
    axes = AXES.get((attention, pool.layout), pool.layout)
    head_dim = int(getattr(pool, "head_dim", 0) or getattr(pool, "kv_cache_dim", 0) or 0)
    return Namespace(
        model=config.model_name or "",
        attention=attention,
        dtype=_dtype(pool),
        object_layout=f"{axes}:{page_nbytes // objects}",
        page_size=int(getattr(config, "logical_page_size", None) or getattr(pool, "page_size", 1) or 1),
        layers=_layers(pool),
        heads=int(getattr(pool, "head_num", 0) or 0) // objects,
        head_dim=head_dim,
        v_head_dim=int(getattr(pool, "v_head_dim", 0) or head_dim),  # 0.5.14 and before: the same
        ranks=_ranks(config, replicated or bool(slices)),
    )


def head_slices(config: Any, pool: Any, replicated: bool) -> range:
    """Which of ``tp_lcm_size`` slices of a page's heads this rank has; none where heads stay together.

    SGLang splits when the ranks are fewer than the slices (``should_split_heads``). A rank that has one slice
    keeps it by the same name here, so that the others find it. Raises SettingsError when the heads do
    not divide: slices of the same name would be of different heads.
    """
    count = int(getattr(config, "tp_lcm_size", None) or 0)
    if not count or replicated or pool.layout != "page_head":
        return WHOLE
    heads, slices = int(pool.head_num), count // config.tp_size
    if heads % slices:
        raise SettingsError(
            f"tp_lcm_size {count} cuts the {heads} KV heads of each of {config.tp_size} ranks into {slices} "
            "slices, and they do not divide; it is at most the number of the model's KV heads"
        )
    return range(config.tp_rank * slices, (config.tp_rank + 1) * slices)


def is_replicated(config: Any, name: str, pool: Any) -> bool:
    """Whether every TP rank holds the same bytes in this pool.

    SGLang says it of the model (``is_mla_model``), but a recurrent state is sharded even there,
    and so is a draft model's MHA pool: a shared key would give one rank another rank's heads.
    """
    return bool(config.is_mla_model) and name != "mamba" and _attention(pool) != "mha"


def _attention(pool: Any) -> str:
    classes = [cls.__name__ for cls in type(pool).__mro__]
    if any(name.startswith("MHAToken") for name in classes):
        return "mha"
    if any(name.startswith("MLAToken") for name in classes):
        return "mla"
    return classes[0]


def _dtype(pool: Any) -> str:
    """All dtypes of the pool's buffers; its ``dtype`` alone misses what a state or an index is in.

    fp8 is stored as uint8, which does not say which fp8 it is: there the server's own flag does.
    """
    names = ("dtype", "temporal_dtype", "conv_dtype", "indexer_dtype")
    found = [str(getattr(pool, name)).removeprefix("torch.") for name in names if hasattr(pool, name)]
    if "uint8" in found:
        found.append(str(getattr(server_args(), "kv_cache_dtype", "")))
    found.append(getattr(pool, "storage_format_tag", None) or "")
    return "/".join(dict.fromkeys(part for part in found if part))


def _layers(pool: Any) -> tuple[int, int]:
    first = getattr(pool, "start_layer", None)
    count = getattr(pool, "layer_num", None) or getattr(pool, "num_mamba_layers", 0)
    return int(first or 0), int(first or 0) + int(count or 0)


def _ranks(config: Any, replicated: bool) -> tuple[tuple[str, int, int], ...]:
    axes = [
        ("tp", config.tp_rank, config.tp_size),
        ("pp", config.pp_rank, config.pp_size),
        ("cp", getattr(config, "attn_cp_rank", 0), getattr(config, "attn_cp_size", 1)),
        ("dcp", getattr(config, "dcp_rank", 0), getattr(config, "dcp_size", 1)),
    ]
    return tuple(axis for axis in axes if axis[2] > 1 and not (replicated and axis[0] == "tp"))
