"""L1 and L2 of one rank, as the options say, and the copies between them."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.engine.layouts import find_layout
from hicache_storage.engine.options import EngineOptions
from hicache_storage.engine.pools import DevicePool, HostPool, find_device, pool_slots
from hicache_storage.engine.shape import KVShape
from hicache_storage.engine.transfer import Transfer, open_transfer


@dataclass(frozen=True, slots=True)
class Memory:
    """Two pools, and what copies between them."""

    l1: DevicePool
    l2: HostPool
    transfer: Transfer

    def close(self) -> None:
        """End copies and let go of both pools."""
        self.transfer.close()
        self.l1.close()
        self.l2.close()


def l1_and_l2_slots(shape: KVShape, options: EngineOptions) -> tuple[int, int]:
    """Pages of L1 and L2. Raises SettingsError for sizes that cannot be."""
    return pool_slots(
        options.page_size,
        shape.page_nbytes(options.page_size),
        options.l1_tokens,
        options.hicache_ratio,
        options.hicache_size,
    )


def open_memory(shape: KVShape, options: EngineOptions) -> Memory:
    """Pools for pages of ``shape``; options are those in force.

    Raises SettingsError for options that cannot be had here, and MemoryError naming what is short.
    """
    device = find_device(options.device)
    layout = find_layout(options.mem_layout, shape.attention)
    l1_slots, l2_slots = l1_and_l2_slots(shape, options)
    l1 = DevicePool(shape, options.page_size, l1_slots, device)
    l2 = HostPool(
        shape, options.page_size, l2_slots, layout, device, options.hugepages, prefault=options.prefault
    )
    try:
        return Memory(l1, l2, open_transfer(options.io_backend, l1, l2))
    except BaseException:
        l2.close()
        raise
