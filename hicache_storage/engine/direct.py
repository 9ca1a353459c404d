"""``direct``: copy engines move pages, in as few and as large pieces as the layouts allow.

A page of ``page_first_direct`` is one piece for keys and one for values in L2, and as many pieces as
there are layers in L1. ``cudaMemcpy2DAsync`` copies such a pair at once: its rows are the layers,
each as wide as all tokens and heads of one layer. Where slots are neighbours on both sides and few
layers are asked for, the rows are the pages instead.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from hicache_storage.engine.pools import PagePool
from hicache_storage.engine.runs import runs

STEP_NBYTES = 1 << 19
"""A step has as many layers as make a copy this large: smaller ones take longer to start than to run."""

_MAX_PITCH = 2**31 - 1
"""Of a two-dimensional copy (cudaDevAttrMaxPitch); rows farther apart are copied one by one."""

_MEMCPY_DEFAULT = 4
"""cudaMemcpyDefault: the addresses say which way it goes."""


@dataclass(frozen=True, slots=True)
class Copy2D:
    """``rows`` runs of ``width`` bytes, ``*_pitch`` bytes apart on either side."""

    target: int
    target_pitch: int
    source: int
    source_pitch: int
    width: int
    rows: int


def copy_runs(
    source: PagePool,
    source_slots: Sequence[int],
    target: PagePool,
    target_slots: Sequence[int],
    by_layer: bool,
) -> Iterator[range]:
    """On a CPU: neighbouring pages as one strided copy."""
    for layers in _steps(source.sizes["layer"], 1 if by_layer else source.sizes["layer"]):
        for s, t, count in runs(source_slots, target_slots):
            target.pages[t : t + count, :, layers.start : layers.stop].copy_(
                source.pages[s : s + count, :, layers.start : layers.stop]
            )
        yield layers


def copy_2d(
    source: PagePool,
    source_slots: Sequence[int],
    target: PagePool,
    target_slots: Sequence[int],
    by_layer: bool,
) -> Iterator[range]:
    """On CUDA: two-dimensional copies, enqueued on the current stream.

    Layouts that interleave layers or heads with tokens have no wide rows. Torch copies these page by
    page through a staging buffer: right, but slow, and no combination that SGLang would run.
    """
    count = source.sizes["layer"]
    wide = _is_wide(source) and _is_wide(target)
    depth = count if not by_layer else min(count, -(-STEP_NBYTES // _width(source)))
    stream = torch.cuda.current_stream(target.pages.device if target.pages.is_cuda else source.pages.device)
    for layers in _steps(count, depth):
        if wide:
            for piece in pieces(source, source_slots, target, target_slots, layers):
                _enqueue(piece, stream.cuda_stream)
        else:
            for s, t in zip(source_slots, target_slots, strict=True):
                target.pages[t, :, layers.start : layers.stop].copy_(
                    source.pages[s, :, layers.start : layers.stop], non_blocking=True
                )
        yield layers


def pieces(
    source: PagePool,
    source_slots: Sequence[int],
    target: PagePool,
    target_slots: Sequence[int],
    layers: range,
) -> Iterator[Copy2D]:
    """The two-dimensional copies that move these layers of these pages."""
    width = _width(source)
    for s, t, count in runs(source_slots, target_slots):
        for kv in range(source.sizes["kv"]):
            inner, outer = ("layer", "page") if len(layers) >= count else ("page", "layer")
            rows = {"layer": len(layers), "page": count}
            for index in range(rows[outer]):
                offset = {"page": 0, "layer": 0, outer: index}
                place = (kv, layers.start + offset["layer"])
                yield Copy2D(
                    _address(target, t + offset["page"], *place),
                    _pitch(target, inner),
                    _address(source, s + offset["page"], *place),
                    _pitch(source, inner),
                    width,
                    rows[inner],
                )


def _steps(layers: int, depth: int) -> Iterator[range]:
    for start in range(0, layers, depth):
        yield range(start, min(start + depth, layers))


def _width(pool: PagePool) -> int:
    """Bytes of one layer of a page's keys (or values)."""
    return math.prod(pool.pages.shape[3:]) * pool.pages.element_size()


def _is_wide(pool: PagePool) -> bool:
    """Whether tokens, heads and words of one layer of a page are one run of memory."""
    return pool.pages[0, 0, 0].is_contiguous()


def _pitch(pool: PagePool, axis: str) -> int:
    return pool.pages.stride({"page": 0, "layer": 2}[axis]) * pool.pages.element_size()


def _address(pool: PagePool, page: int, kv: int, layer: int) -> int:
    offset = page * pool.pages.stride(0) + kv * pool.pages.stride(1) + layer * pool.pages.stride(2)
    return pool.pages.data_ptr() + offset * pool.pages.element_size()


def _enqueue(piece: Copy2D, stream: int) -> None:
    memcpy_2d = _memcpy_2d()
    if max(piece.target_pitch, piece.source_pitch) <= _MAX_PITCH:
        rows = [(0, piece.rows)]
    else:
        rows = [(row, 1) for row in range(piece.rows)]
    for row, count in rows:
        status = memcpy_2d(
            piece.target + row * piece.target_pitch,
            min(piece.target_pitch, _MAX_PITCH),
            piece.source + row * piece.source_pitch,
            min(piece.source_pitch, _MAX_PITCH),
            piece.width,
            count,
            _MEMCPY_DEFAULT,
            stream,
        )
        if status:
            raise RuntimeError(f"cudaMemcpy2DAsync: error {status} for {piece}")


@functools.cache
def _memcpy_2d() -> Callable[..., int]:
    """``cudaMemcpy2DAsync`` of the CUDA runtime that torch has loaded; torch itself offers none."""
    major = str(torch.version.cuda).split(".", maxsplit=1)[0]
    function = ctypes.CDLL(f"libcudart.so.{major}").cudaMemcpy2DAsync
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.argtypes = [address, size, address, size, size, size, number, address]
    function.restype = number
    return function
