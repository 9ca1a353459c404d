"""Copies between L1 and L2: when they run. How the bytes go is the ``io_backend``'s business.

``direct`` has copy engines do it (``cudaMemcpy2DAsync``), ``kernel`` a kernel on the GPU that reads
and writes pinned host pages itself. On CUDA either runs on two streams of its own, one each way,
beside the kernels of the model, and is awaited by events. On a CPU both are plain torch copies, and
loads run in a thread of their own: it stands for the stream, so that what computes has to wait for
its layers there too and an engine that does not is found out without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeAlias

import torch

from hicache_storage.engine import direct, kernel
from hicache_storage.engine.loading import LOADED, CudaLoading, HostLoading, Loading
from hicache_storage.engine.pools import DevicePool, HostPool, PagePool
from hicache_storage.errors import SettingsError

Copy: TypeAlias = Callable[[PagePool, Sequence[int], PagePool, Sequence[int], bool], Iterator[range]]
"""Copies pages between slots of two pools, some layers a step, and yields the layers of each step.

The last argument says whether somebody waits for single layers; if not, one step may do it all. On
CUDA a step is enqueued on the current stream.
"""


class Transfer(Protocol):
    """Moves whole pages between slots of the two pools. One thread at a time."""

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> Loading:
        """L2 -> L1, begun. Neither tier's slots may be given away before the end of it.

        What is enqueued already may go on reading the L1 slots: the copies come after it. When it
        raises, nothing is under way.
        """

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> float:
        """L1 -> L2. Returns when the host sees the pages; seconds."""

    def close(self) -> None:
        """End the thread, if there is one, after the loads in progress."""


class HostTransfer:
    """Where L1 is host memory too."""

    def __init__(self, l1: PagePool, l2: PagePool, copy: Copy) -> None:
        self._l1, self._l2, self._copy = l1, l2, copy
        self._loads = ThreadPoolExecutor(1, thread_name_prefix="hicache-load")

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> Loading:
        if not l2_slots:
            return LOADED
        loading = HostLoading(self._copy(self._l2, l2_slots, self._l1, l1_slots, True))
        self._loads.submit(loading.run)
        return loading

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> float:
        if not l1_slots:
            return 0.0
        storing = HostLoading(self._copy(self._l1, l1_slots, self._l2, l2_slots, False))
        storing.run()
        return storing.wait()

    def close(self) -> None:
        self._loads.shutdown()


class CudaTransfer:
    """Between a CUDA device and pinned host memory."""

    def __init__(self, l1: PagePool, l2: PagePool, copy: Copy) -> None:
        self._l1, self._l2, self._copy = l1, l2, copy
        self._device = l1.pages.device
        self._loads = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._stores = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def load(self, l2_slots: Sequence[int], l1_slots: Sequence[int]) -> Loading:
        if not l2_slots:
            return LOADED
        return self._begin(self._loads, self._copy(self._l2, l2_slots, self._l1, l1_slots, True))

    def store(self, l1_slots: Sequence[int], l2_slots: Sequence[int]) -> float:
        if not l1_slots:
            return 0.0
        return self._begin(self._stores, self._copy(self._l1, l1_slots, self._l2, l2_slots, False)).wait()

    def close(self) -> None:
        self._loads.synchronize()
        self._stores.synchronize()

    def _begin(self, stream: torch.cuda.Stream, steps: Iterator[range]) -> CudaLoading:
        # the slots may still be read, or written, by work on the pages that were there before
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            try:
                return CudaLoading(steps, stream)
            except BaseException:
                stream.synchronize()  # what was enqueued must not write late
                raise


_COPIES: dict[tuple[str, str], Copy] = {
    ("direct", "cpu"): direct.copy_runs,
    ("direct", "cuda"): direct.copy_2d,
    ("kernel", "cpu"): kernel.copy_indexed,
    ("kernel", "cuda"): kernel.copy_strided,
}

IO_BACKENDS = tuple(dict.fromkeys(io_backend for io_backend, _ in _COPIES))


def check_io_backend(name: str) -> None:
    """Raise SettingsError naming the choices unless there is an ``io_backend`` called ``name``."""
    if name not in IO_BACKENDS:
        raise SettingsError(f"io_backend {name!r} is none of: {', '.join(IO_BACKENDS)}")


def open_transfer(io_backend: str, l1: DevicePool, l2: HostPool) -> Transfer:
    """The transfer called ``io_backend`` between these pools.

    Raises SettingsError when what it needs is not installed.
    """
    device = l1.pages.device.type
    copy = _COPIES[io_backend, device]
    if copy is kernel.copy_strided:
        kernel.load_kernel()
    elif copy is direct.copy_2d:
        direct.load_memcpy_2d()
    return CudaTransfer(l1, l2, copy) if device == "cuda" else HostTransfer(l1, l2, copy)
