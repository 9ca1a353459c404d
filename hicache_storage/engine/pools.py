"""L1 and L2: two pools of page slots, each one allocation.

A pool is seen as ``pages``, a strided view with the axes (page, kv, layer, token, head, word)
whatever its layout, so that copies and checks are one expression for all layouts. KV is moved and
compared, never computed with, so elements are raw words: int64 where a head's bytes are a
multiple of 8, bytes otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hicache_storage.buffers import Buffer
from hicache_storage.engine.host_memory import allocate, pin, unpin
from hicache_storage.engine.layouts import LAYER_FIRST, Layout
from hicache_storage.engine.memory_limits import human
from hicache_storage.engine.shape import KVShape
from hicache_storage.errors import SettingsError

DEVICES = ("cpu", "cuda")


class PagePool:
    """Slots for ``slots`` pages in ``memory``, a flat byte tensor. One thread at a time."""

    def __init__(
        self, memory: torch.Tensor, shape: KVShape, page_size: int, slots: int, layout: Layout
    ) -> None:
        whole_words = shape.head_nbytes % 8 == 0
        self.layout = layout
        self.slots = slots
        self.nbytes = memory.nbytes
        self.sizes = {
            "page": slots,
            "kv": shape.kv,
            "layer": shape.layers,
            "token": page_size,
            "head": shape.heads,
            "dim": shape.head_nbytes // 8 if whole_words else shape.head_nbytes,
        }
        self.pages = layout.canonical(memory.view(torch.int64) if whole_words else memory, self.sizes)
        self._free = list(range(slots))

    @property
    def free_slots(self) -> int:
        """Slots that hold no page."""
        return len(self._free)

    def alloc(self) -> int | None:
        """A free slot, or None when there is none; its bytes are whatever was there before."""
        return self._free.pop() if self._free else None

    def free(self, slots: Iterable[int]) -> None:
        """Give slots back; nothing may touch their memory any more."""
        self._free.extend(slots)

    def close(self) -> None:
        """Let go of the memory."""
        self.pages = self.pages.new_empty(0)


class DevicePool(PagePool):
    """L1: pages on the device, layer by layer as the attention kernels read them."""

    def __init__(self, shape: KVShape, page_size: int, slots: int, device: torch.device) -> None:
        nbytes = slots * shape.page_nbytes(page_size)
        try:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise MemoryError(f"L1 of {human(nbytes)} does not fit on {device}: {error}") from error
        super().__init__(memory, shape, page_size, slots, LAYER_FIRST)


class HostPool(PagePool):
    """L2: pages in host memory, one page-aligned allocation that copies and backends address.

    For a CUDA device it is pinned (``cudaHostRegister``, as SGLang does it), so that
    cudaMemcpyAsync runs beside the kernels. ``memory_kind`` says which memory it is. For
    ``hugepages`` and ``prefault`` see ``host_memory``.
    """

    def __init__(
        self,
        shape: KVShape,
        page_size: int,
        slots: int,
        layout: Layout,
        device: torch.device,
        hugepages: str | None = None,
        *,
        prefault: bool = False,
    ) -> None:
        nbytes = slots * shape.page_nbytes(page_size)
        mapping = allocate(nbytes, hugepages, prefault=prefault)
        memory = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes)
        self.buffer = Buffer.of(mapping).slice(0, nbytes)
        self._pinned = device.type == "cuda"
        if self._pinned:
            pin(self.buffer)
        super().__init__(memory, shape, page_size, slots, layout)
        pages = "page-aligned mmap" if hugepages is None else f"huge pages of {hugepages}"
        self.memory_kind = f"pinned (cudaHostRegister), {pages}" if self._pinned else f"pageable, {pages}"
        self._pieces = layout.pieces(self.sizes)
        self._piece_nbytes = nbytes // slots // self._pieces

    def page(self, slot: int) -> list[Buffer]:
        """The pieces of the page in ``slot``, in the order of their bytes in the stored object."""
        size, pool, owner = self._piece_nbytes, self.slots, self.buffer.owner
        start = self.buffer.address + slot * size
        return [Buffer(start + piece * pool * size, size, owner) for piece in range(self._pieces)]

    def close(self) -> None:
        """Unpin the memory; it is unmapped when the last buffer that points into it is gone."""
        super().close()
        if self._pinned:
            self._pinned = False
            unpin(self.buffer)
        self.buffer = Buffer(0, 0)


def pool_slots(
    page_size: int, page_nbytes: int, l1_tokens: int, hicache_ratio: float, hicache_size: float | None
) -> tuple[int, int]:
    """Pages of L1 and of L2, by SGLang's options; see TierEngine.

    Raises SettingsError when L1 holds no page, or L2 is not larger than L1 (SGLang's rule: all of
    L1 has its copy in L2, and prefetches need the rest).
    """
    l1_slots = l1_tokens // page_size
    if l1_slots < 1:
        raise SettingsError(f"l1_tokens {l1_tokens} hold no page of {page_size} tokens")
    wanted = hicache_size * 1e9 / page_nbytes if hicache_size else l1_slots * hicache_ratio
    if not (math.isfinite(wanted) and int(wanted) > l1_slots):
        given = f"hicache_size {hicache_size} (GB)" if hicache_size else f"hicache_ratio {hicache_ratio}"
        raise SettingsError(
            f"L2 must be larger than L1, which has {l1_slots} pages; by {given} it has {wanted:g}"
        )
    return l1_slots, int(wanted)


def find_device(name: str) -> torch.device:
    """The device called ``name``. Raises SettingsError when it is unknown or not there."""
    if name not in DEVICES:
        raise SettingsError(f"device {name!r} is none of: {', '.join(DEVICES)}")
    if name == "cuda" and not torch.cuda.is_available():
        raise SettingsError("device 'cuda': torch sees no CUDA device here")
    return torch.device(name)
