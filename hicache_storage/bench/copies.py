"""How fast pages go between L1 and L2, next to one plain copy of as many bytes, and what that hides.

The peer of every figure is measured in the same round: one contiguous copy between the device and
pinned memory, the most that the way between them carries. Slots are in random order, as in a cache
that has evicted for a while.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from hicache_storage.engine.layouts import find_layout
from hicache_storage.engine.loading import LOADED, Loading
from hicache_storage.engine.pools import DevicePool, HostPool
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.transfer import Transfer, open_transfer

BARS = {("page_first_direct", "direct"): 0.9, ("page_first", "kernel"): 0.8}
"""Least share of the peak, on CUDA with pages of 64 tokens, by layout and I/O backend."""


@dataclass(frozen=True, slots=True)
class CopyRate:
    """One direction of one combination: medians over the rounds."""

    mem_layout: str
    io_backend: str
    direction: str
    """H2D is L2 -> L1, D2H is L1 -> L2."""
    gb_s: float
    peak_gb_s: float
    of_peak: float
    """Median of the rounds' own ratios."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """A load beside as much computing: medians over the rounds, in seconds."""

    mem_layout: str
    io_backend: str
    load: float
    compute: float
    both: float
    efficiency: float
    """Share of the shorter of the two that was hidden: 1 is all of it, 0 is one after the other."""


class Bench:
    """Two pools of as many pages, and a transfer between them, on one device."""

    def __init__(
        self,
        shape: KVShape,
        page_size: int,
        pages: int,
        mem_layout: str,
        io_backend: str,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.device = device
        self.l1 = DevicePool(shape, page_size, pages, device)
        self.l2 = HostPool(shape, page_size, pages, find_layout(mem_layout, shape.attention), device)
        self.transfer: Transfer = open_transfer(io_backend, self.l1, self.l2)
        self.nbytes = self.l1.nbytes
        order = random.Random(0)
        self.l1_slots = order.sample(range(pages), pages)
        self.l2_slots = order.sample(range(pages), pages)
        self._device_memory = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        self._host_memory = torch.zeros(self.nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")

    def begin_load(self) -> Loading:
        """L2 -> L1, every page."""
        return self.transfer.load(self.l2_slots, self.l1_slots)

    def store(self) -> None:
        """L1 -> L2, every page."""
        self.transfer.store(self.l1_slots, self.l2_slots)

    def peak_h2d(self) -> None:
        """The same number of bytes as one copy."""
        self._device_memory.copy_(self._host_memory, non_blocking=True)

    def peak_d2h(self) -> None:
        """The same number of bytes as one copy."""
        self._host_memory.copy_(self._device_memory, non_blocking=True)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long ``work`` takes until the device has nothing left to do."""
        self._synchronize()
        began = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - began

    def close(self) -> None:
        """Let go of the memory."""
        self.transfer.close()
        self.l1.close()
        self.l2.close()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextmanager
def opened(
    shape: KVShape, page_size: int, pages: int, mem_layout: str, io_backend: str, device: torch.device
) -> Iterator[Bench]:
    """A Bench whose memory is warm and whose kernels are compiled."""
    bench = Bench(shape, page_size, pages, mem_layout, io_backend, device)
    try:
        bench.store()
        bench.begin_load().wait()
        bench.peak_h2d()
        bench.peak_d2h()
        yield bench
    finally:
        bench.close()


def copy_rates(bench: Bench, mem_layout: str, io_backend: str, rounds: int) -> list[CopyRate]:
    """Both directions of the bench's combination."""
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "H2D": (lambda: bench.begin_load().wait(), bench.peak_h2d),
        "D2H": (bench.store, bench.peak_d2h),
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, (ours, peak) in ways.items():
            taken[way].append((bench.seconds(ours), bench.seconds(peak)))
    return [
        CopyRate(
            mem_layout,
            io_backend,
            way,
            gb_s=bench.nbytes / median(ours for ours, _ in rows) / 1e9,
            peak_gb_s=bench.nbytes / median(peak for _, peak in rows) / 1e9,
            of_peak=median(peak / ours for ours, peak in rows),
        )
        for way, rows in taken.items()
    ]


def overlap(bench: Bench, mem_layout: str, io_backend: str, rounds: int) -> Overlap:
    """A load whose layers are waited for one by one, between matrix products of about the same length."""
    size = 4096 if bench.device.type == "cuda" else 256
    matrix = torch.randn(size, size, device=bench.device, dtype=torch.bfloat16 if size == 4096 else None)
    out = torch.empty_like(matrix)

    def compute(loading: Loading, products: int) -> None:
        for layer in range(bench.shape.layers):
            loading.wait_layer(layer)
            for _ in range(products):
                torch.mm(matrix, matrix, out=out)

    compute(LOADED, 1)
    product = bench.seconds(lambda: compute(LOADED, 4)) / bench.shape.layers / 4
    load = bench.seconds(lambda: bench.begin_load().wait())
    products = max(1, round(load / bench.shape.layers / product))

    def both() -> None:
        loading = bench.begin_load()
        compute(loading, products)
        loading.wait()

    rows = [
        (
            bench.seconds(lambda: bench.begin_load().wait()),
            bench.seconds(lambda: compute(LOADED, products)),
            bench.seconds(both),
        )
        for _ in range(rounds)
    ]
    load, alone, together = (median(column) for column in zip(*rows, strict=True))
    hidden = (load + alone - together) / min(load, alone)
    return Overlap(mem_layout, io_backend, load, alone, together, hidden)
