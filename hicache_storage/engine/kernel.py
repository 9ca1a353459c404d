"""``kernel``: a kernel on the GPU reads and writes pinned host pages at their own addresses.

No layout has to be contiguous for it: rows of one head go as whole runs of bytes whatever lies
between them, so ``page_first`` and ``page_head`` are as good as ``layer_first``. It takes some of the
GPU's multiprocessors away from the model while it runs. On a CPU torch's indexing does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    from hicache_storage.engine.pools import PagePool


def copy_indexed(
    source: PagePool,
    source_slots: Sequence[int],
    target: PagePool,
    target_slots: Sequence[int],
    by_layer: bool,
) -> Iterator[range]:
    """On a CPU: gather the pages, then scatter them."""
    gathered, scattered = torch.tensor(source_slots), torch.tensor(target_slots)
    for layers in _steps(source, by_layer):
        part = source.pages[:, :, layers.start : layers.stop].index_select(0, gathered)
        target.pages[:, :, layers.start : layers.stop].index_copy_(0, scattered, part)
        yield layers


def copy_strided(
    source: PagePool,
    source_slots: Sequence[int],
    target: PagePool,
    target_slots: Sequence[int],
    by_layer: bool,
) -> Iterator[range]:
    """On CUDA: one launch a step, on the current stream; one kernel for all layouts and both ways."""
    device = source.pages.device if source.pages.is_cuda else target.pages.device
    both = torch.tensor([list(source_slots), list(target_slots)], dtype=torch.int64, device=device)
    for layers in _steps(source, by_layer):
        launch(source.pages, both[0], target.pages, both[1], layers)
        yield layers


def launch(
    source: torch.Tensor,
    source_slots: torch.Tensor,
    target: torch.Tensor,
    target_slots: torch.Tensor,
    layers: range,
) -> None:
    """Run the kernel over pages seen as ``PagePool.pages``."""
    copy = load_kernel()
    _, kv, _, tokens, heads, words = source.shape
    row_block, word_block = copy.blocks(tokens * heads, words, source.element_size())
    grid = (len(source_slots), -(-tokens * heads // row_block), kv)
    copy.copy_rows[grid](
        source,
        target,
        source_slots,
        target_slots,
        *(source.stride(axis) for axis in range(5)),
        *(target.stride(axis) for axis in range(5)),
        layers.start,
        tokens * heads,
        heads,
        words,
        LAYERS=len(layers),
        ROWS=row_block,
        WORDS=word_block,
        enable_fp_fusion=False,
    )


def _steps(pool: PagePool, by_layer: bool) -> Iterator[range]:
    layers = pool.sizes["layer"]
    if not by_layer:
        yield range(layers)
        return
    yield from (range(layer, layer + 1) for layer in range(layers))


def load_kernel() -> Any:
    """The module with the kernel. Raises SettingsError where Triton is not installed."""
    try:
        return import_module("hicache_storage.engine.triton_copy")
    except ModuleNotFoundError as error:
        raise SettingsError("io_backend kernel on cuda needs Triton: pip install triton") from error
