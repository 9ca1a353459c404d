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
from typing import NamedTuple

import torch

from hicache_storage.engine.pools import PagePool
from hicache_storage.engine.runs import runs
from hicache_storage.errors import SettingsError

STEP_NBYTES = 1 << 19
"""A step has as many layers as make a copy this large: smaller ones take longer to start than to run."""

_MAX_PITCH = 2**31 - 1
"""Of a two-dimensional copy (cudaDevAttrMaxPitch); rows farther apart are copied one by one."""

_MEMCPY_DEFAULT = 4
"""cudaMemcpyDefault: the addresses say which way it goes."""


class Copy2D(NamedTuple):
    """``rows`` runs of ``width`` bytes, ``*_pitch`` bytes apart: the arguments of cudaMemcpy2DAsync."""

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
            _enqueue(pieces(source, source_slots, target, target_slots, layers), stream.cuda_stream)
        else:
            for s, t in zip(source_slots, target_slots, strict=True):
                target.pages[t, :, layers.start : layers.stop].copy_(
                    source.pages[s, :, layers.start : layers.stop]
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
    # plain integers from here on: thousands of copies have to start faster than they run
    width, depth = _width(source), len(layers)
    from_page, from_kv, from_layer = _strides(source)
    to_page, to_kv, to_layer = _strides(target)
    from_first = source.pages.data_ptr() + layers.start * from_layer
    to_first = target.pages.data_ptr() + layers.start * to_layer
    for s, t, count in runs(source_slots, target_slots):
        for kv in range(source.sizes["kv"]):
            read = from_first + s * from_page + kv * from_kv
            write = to_first + t * to_page + kv * to_kv
            if depth >= count:
                for page in range(count):
                    yield Copy2D(
                        write + page * to_page, to_layer, read + page * from_page, from_layer, width, depth
                    )
            else:
                for layer in range(depth):
                    yield Copy2D(
                        write + layer * to_layer, to_page, read + layer * from_layer, from_page, width, count
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


def _strides(pool: PagePool) -> tuple[int, int, int]:
    """Bytes from one page, kv and layer to the next."""
    nbytes = pool.pages.element_size()
    page, kv, layer = pool.pages.stride()[:3]
    return page * nbytes, kv * nbytes, layer * nbytes


def _enqueue(copies: Iterator[Copy2D], stream: int) -> None:
    memcpy_2d = load_memcpy_2d()
    for copy in copies:
        if copy.target_pitch <= _MAX_PITCH >= copy.source_pitch:
            status = memcpy_2d(*copy, _MEMCPY_DEFAULT, stream)
            if status:
                raise RuntimeError(f"cudaMemcpy2DAsync: error {status} for {copy}")
        else:
            _enqueue(_rows(copy), stream)


def _rows(copy: Copy2D) -> Iterator[Copy2D]:
    """The same copy, a row at a time."""
    for row in range(copy.rows):
        target, source = copy.target + row * copy.target_pitch, copy.source + row * copy.source_pitch
        yield Copy2D(target, copy.width, source, copy.width, copy.width, 1)


@functools.cache
def load_memcpy_2d() -> Callable[..., int]:
    """``cudaMemcpy2DAsync`` of the CUDA runtime that torch has loaded; torch itself offers none.

    Raises SettingsError where there is no such runtime.
    """
    name = f"libcudart.so.{str(torch.version.cuda).split('.', maxsplit=1)[0]}"
    try:
        function = ctypes.CDLL(name).cudaMemcpy2DAsync
    except OSError as error:
        raise SettingsError(f"io_backend direct on cuda needs {name}, the CUDA runtime: {error}") from error
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.argtypes = [address, size, address, size, size, size, number, address]
    function.restype = number
    return function
