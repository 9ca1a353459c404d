"""Where the pages of SGLang's host pools lie in memory.

A host pool hands out a page as a strided view of its one big buffer (``get_data_page(index,
flat=False)``). The view's contiguous runs, in row-major order, are the page's buffers: that is the
same order of bytes as the flat page of the generic interface, in every layout, so what one
interface generation wrote, another reads. (``get_page_buffer_meta`` interleaves K and V by layer in
``layer_first`` and refuses some layouts; it is asked only where there is no view.)

Addresses are linear in the page number, so a pool is asked once, at registration.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from hicache_storage.buffers import Buffer, Page


@dataclass(frozen=True, slots=True)
class Piece:
    """One buffer of every page: where it lies in page 0, and how far apart pages are, in bytes."""

    address: int
    nbytes: int
    step: int


@dataclass(frozen=True, slots=True)
class PageMap:
    """The memory of every page of a pool."""

    pieces: tuple[Piece, ...]
    page_size: int
    """Host indices a page: tokens, or 1 for pools of states."""

    @property
    def nbytes(self) -> int:
        """Size of a page in bytes."""
        return sum(piece.nbytes for piece in self.pieces)

    def page(self, index: int) -> Page:
        """The page that starts at host index ``index``."""
        number = index // self.page_size
        return [Buffer(piece.address + number * piece.step, piece.nbytes) for piece in self.pieces]


def pool_memory(pool: Any) -> list[Buffer]:
    """The allocations behind a pool's buffers, each once, to be registered with the backend."""
    seen: dict[int, Buffer] = {}
    for tensor in _tensors(pool):
        storage = tensor.untyped_storage()
        if storage.nbytes():
            seen[storage.data_ptr()] = Buffer(storage.data_ptr(), storage.nbytes(), storage)
    return list(seen.values())


def map_pages(pool: Any) -> PageMap | None:
    """Where the pages lie, or None when pages can only be copied in and out.

    Asks the pool for its first pages and checks that addresses are linear in the page number and
    lie in the pool's own memory; a pool that answers with copies is one of those with None.
    """
    page_size = int(getattr(pool, "page_size", 1) or 1)
    count = min(3, int(getattr(pool, "size", page_size)) // page_size)
    memory = pool_memory(pool)
    for runs_of in (_runs_of_view, _runs_of_meta):
        try:
            pages = [runs_of(pool, number * page_size, page_size) for number in range(count)]
        except (ValueError, NotImplementedError, AttributeError, AssertionError, TypeError, RuntimeError):
            continue
        pieces = _linear(pages)
        ends = [Buffer(p.address, p.nbytes) for p in pieces or ()]
        if pieces and all(any(m.contains(end) for m in memory) for end in ends):
            return PageMap(pieces, page_size)
    return None


def _linear(pages: Sequence[Sequence[tuple[int, int]]]) -> tuple[Piece, ...] | None:
    """The pieces of page 0 with their step, or None when later pages are not where it predicts."""
    if not pages or not pages[0]:
        return None
    first, second = pages[0], pages[min(1, len(pages) - 1)]
    if len(first) != len(second):
        return None
    pieces = tuple(
        Piece(address, nbytes, later - address)
        for (address, nbytes), (later, _) in zip(first, second, strict=True)
    )
    for number, page in enumerate(pages):
        predicted = [(piece.address + number * piece.step, piece.nbytes) for piece in pieces]
        if list(page) != predicted:
            return None
    if len(pages) > 1 and any(piece.step <= 0 for piece in pieces):
        return None  # the same address for two pages: a copy was made
    return pieces


def _runs_of_view(pool: Any, index: int, page_size: int) -> list[tuple[int, int]]:
    view = pool.get_data_page(index, flat=False)
    if view.dim() == 1 and page_size != 1:
        raise ValueError("the page came flat, so it may be a copy")
    return list(contiguous_runs(view))


def _runs_of_meta(pool: Any, index: int, page_size: int) -> list[tuple[int, int]]:
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(index, index + page_size))
    if isinstance(sizes, int):
        sizes = [sizes] * len(addresses)
    return list(zip(map(int, addresses), map(int, sizes), strict=True))


def contiguous_runs(view: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(address, bytes) of each contiguous run of a strided tensor, in row-major order."""
    item = view.element_size()
    run, inner = 1, view.dim()
    while inner and (view.shape[inner - 1] == 1 or view.stride(inner - 1) == run):
        run *= view.shape[inner - 1]
        inner -= 1
    for position in itertools.product(*(range(size) for size in view.shape[:inner])):
        offset = sum(i * stride for i, stride in zip(position, view.stride()[:inner], strict=True))
        yield view.data_ptr() + offset * item, run * item


def _tensors(pool: Any) -> Iterator[torch.Tensor]:
    """All tensors a pool may keep pages in, whatever it calls them."""
    named = [getattr(pool, name, None) for name in ("kv_buffer", "k_buffer", "v_buffer")]
    hybrid = getattr(pool, "get_hybrid_pool_buffer", None)
    if hybrid is not None:
        with suppress(NotImplementedError, AttributeError):  # then the named buffers are all there is
            named.append(hybrid())
    for buffers in named:
        for tensor in buffers if isinstance(buffers, (list, tuple)) else [buffers]:
            if isinstance(tensor, torch.Tensor):
                yield tensor
