"""Plain-torch copies for the host <-> device kernels SGLang's pools call.

On a CPU "device" and host pool are both ordinary memory, so every kernel is the same
thing: move rows of ``item_size`` bytes between tables that differ only in stride. Names
and keyword names are the ones of ``sgl_kernel.kvcacheio``; several take tables of raw
addresses instead of tensors, as the real ones do, so wrong addressing shows as wrong bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Rows = Tensor


def _rows(buffer: Tensor, row_bytes: int) -> Rows:
    """The buffer's memory as (rows, row_bytes); the buffer must be contiguous."""
    return buffer.view(-1).view(torch.uint8).view(-1, row_bytes)


def _rows_at(address: int, indices: Tensor, row_bytes: int) -> Rows:
    """Memory from a raw address, just long enough for the rows that are touched."""
    count = int(indices.max()) + 1
    memory = (ctypes.c_uint8 * (count * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, row_bytes)


def _layer(table: Tensor, layer: int, indices: Tensor, row_bytes: int) -> Rows:
    return _rows_at(int(table[layer]), indices, row_bytes)


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int
) -> None:
    _rows(dst, item_size)[dst_indices] = _rows(src, item_size)[src_indices]


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla(src, dst, src_indices, dst_indices, item_size)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    for layer in range(num_layers):
        source = _layer(src_layers, layer, src_indices, item_size)
        _layer(dst_layers, layer, dst_indices, item_size)[dst_indices] = source[src_indices]


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        transfer_kv_all_layer_mla(src, dst, src_indices, dst_indices, item_size, num_layers)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    column = slice(layer_id * item_size, (layer_id + 1) * item_size)
    _rows(dst, item_size)[dst_indices] = _rows(src, src_layout_dim)[:, column][src_indices]


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
) -> None:
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        transfer_kv_per_layer_mla_pf_lf(
            src, dst, src_indices, dst_indices, layer_id, item_size, src_layout_dim
        )


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    target = _rows(dst, dst_layout_dim)
    for layer in range(num_layers):
        source = _layer(src_layers, layer, src_indices, item_size)
        column = slice(layer * item_size, (layer + 1) * item_size)
        target[:, column][dst_indices] = source[src_indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    for src, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        transfer_kv_all_layer_mla_lf_pf(
            src, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
        )


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
) -> None:
    page, offset = src_indices // page_size, src_indices % page_size
    for src, dst in ((src_k, dst_k), (src_v, dst_v)):
        dst[dst_indices] = src[page, :, offset, layer_id]


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
) -> None:
    page, offset = dst_indices // page_size, dst_indices % page_size
    for table, dst in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer in range(num_layers):
            source = _layer(table, layer, src_indices, item_size)[src_indices]
            heads = source.view(dst.dtype).view(-1, head_num, dst.shape[-1])
            dst[page, :, offset, layer] = heads


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for src, dst in zip(src_layers, dst_layers, strict=True):
        dst[dst_indices] = src[src_indices]


def _page_starts(indices: Tensor, page_size: int) -> Tensor:
    return indices[::page_size]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    pages = _page_starts(src_indices, page_size) // page_size
    for src, dst in zip(src_ptrs, dst_ptrs, strict=True):
        dst[dst_indices] = src[pages, layer_id].flatten(0, 1)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """``src_ptrs`` lists the layers of each destination in turn (all K, then all V)."""
    pages = _page_starts(dst_indices, page_size) // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for part, dst in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[part * layers + layer][src_indices]
            dst[pages, layer] = rows.unflatten(0, (len(pages), page_size))


def transfer_kv_mamba_lf_pf(
    src_ptrs: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
) -> None:
    transfer_kv_all_layer_mla_lf_pf(
        src_ptrs, dst, src_indices, dst_indices, item_size, dst_layout_dim, num_layers
    )


transfer_kv_mamba_pf_lf = transfer_kv_per_layer_mla_pf_lf

KERNELS: dict[str, Callable[..., None]] = {
    name: kernel for name, kernel in globals().items() if name.startswith("transfer_kv_")
}
