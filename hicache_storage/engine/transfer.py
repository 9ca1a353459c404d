"""Copies between L1 and L2. ``direct`` lets the copy engines do it, page by page.

On CUDA, copies run on two streams of their own, one each way, and are awaited by events; every
piece is contiguous on both sides, so each is one cudaMemcpyAsync (``page_first`` interleaves layers
token by token and is not: it is for ``kernel``). On a CPU they are plain copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from hicache_storage.engine.pools import DevicePool, HostPool
from hicache_storage.engine.runs import runs
from hicache_storage.errors import SettingsError


class Transfer(Protocol):
    """Moves whole pages between slots of the two pools. One thread at a time."""

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> None:
        """L2 -> L1. Returns when the pages are on the device."""

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        """L1 -> L2. Returns when the host sees the pages."""


class HostTransfer:
    """``direct`` where L1 is host memory too."""

    def __init__(self, l1: DevicePool, l2: HostPool) -> None:
        self._l1, self._l2 = l1, l2

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> None:
        _copy(self._l2.pages, l2_slots, self._l1.pages, l1_slots)

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        _copy(self._l1.pages, l1_slots, self._l2.pages, l2_slots)


class CudaTransfer:
    """``direct`` between a CUDA device and pinned host memory."""

    def __init__(self, l1: DevicePool, l2: HostPool) -> None:
        self._l1, self._l2 = l1, l2
        self._device = l1.pages.device
        self._loads = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stores = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> None:
        # the slots may still be read by work on the pages that were there before
        self._loads.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._loads):
            self._copy_pieces(self._l2.pages, l2_slots, self._l1.pages, l1_slots)
            done = self._loads.record_event()
        done.synchronize()

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> None:
        self._stores.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stores):
            self._copy_pieces(self._l1.pages, l1_slots, self._l2.pages, l2_slots)
            done = self._stores.record_event()
        done.synchronize()

    @staticmethod
    def _copy_pieces(
        source: torch.Tensor, source_slots: Sequence[int], target: torch.Tensor, target_slots: Sequence[int]
    ) -> None:
        for s, t in zip(source_slots, target_slots, strict=True):
            for target_kv, source_kv in zip(target[t], source[s], strict=True):
                for target_layer, source_layer in zip(target_kv, source_kv, strict=True):
                    target_layer.copy_(source_layer, non_blocking=True)


def _copy(
    source: torch.Tensor, source_slots: Sequence[int], target: torch.Tensor, target_slots: Sequence[int]
) -> None:
    for s, t, count in runs(source_slots, target_slots):
        target.narrow(0, t, count).copy_(source.narrow(0, s, count))


def _direct(l1: DevicePool, l2: HostPool) -> Transfer:
    return CudaTransfer(l1, l2) if l1.pages.is_cuda else HostTransfer(l1, l2)


def _kernel(l1: DevicePool, l2: HostPool) -> Transfer:
    if l1.pages.is_cuda:
        raise SettingsError("io_backend kernel has no CUDA kernels yet; take direct")
    return HostTransfer(l1, l2)


IO_BACKENDS: dict[str, Callable[[DevicePool, HostPool], Transfer]] = {"direct": _direct, "kernel": _kernel}


def check_io_backend(name: str) -> None:
    """Raise SettingsError naming the choices unless there is an ``io_backend`` called ``name``."""
    if name not in IO_BACKENDS:
        raise SettingsError(f"io_backend {name!r} is none of: {', '.join(IO_BACKENDS)}")


def open_transfer(io_backend: str, l1: DevicePool, l2: HostPool) -> Transfer:
    """The transfer called ``io_backend`` between these pools."""
    return IO_BACKENDS[io_backend](l1, l2)
