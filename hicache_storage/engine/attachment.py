"""A storage behind L2: it knows L2's memory, and has the threads that call it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_storage.buffers import Buffer
from hicache_storage.engine.controller import CacheController
from hicache_storage.engine.memory_limits import memlock_shortage
from hicache_storage.engine.page_objects import PageObjects, Part
from hicache_storage.engine.pools import HostPool
from hicache_storage.engine.ranks import Ranks
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.side_pools import SidePools
from hicache_storage.errors import SettingsError
from hicache_storage.namespace import Namespace
from hicache_storage.storage import HiCacheStorage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attachment:
    """An attached storage, its controller, and the memory that it knows."""

    storage: HiCacheStorage
    controller: CacheController
    buffers: Sequence[Buffer]

    def end(self, timeout: float) -> bool:
        """End the threads after the calls in progress, and unregister L2.

        False when a call did not return in time: the storage may still use L2, and keeps it.
        """
        if not self.controller.close(timeout):
            logger.warning("a call of the storage does not return; L2 stays registered with it")
            return False
        _unregister(self.storage, self.buffers)
        return True


def attach(
    storage: HiCacheStorage,
    shard: Shard,
    l2: HostPool,
    sides: SidePools,
    min_prefetch_pages: int,
    ranks: Ranks,
) -> Attachment:
    """Register L2 with the storage, and start the threads that call it.

    Raises what the storage raises when it cannot register L2.
    """
    buffers = [l2.buffer, *sides.buffers]
    _register(storage, buffers)
    kv = Part(shard.sliced(storage), "", l2.page, shard.is_writer)
    objects = PageObjects([kv, *sides.parts(storage)])
    controller = CacheController(objects, min_prefetch_pages, sides.restorable, ranks)
    return Attachment(storage, controller, buffers)


def check_identity(storage: HiCacheStorage, expected: Namespace, mem_layout: str) -> None:
    """Raise SettingsError for a storage whose namespace says other bytes than there will be.

    They would be served to whoever believes it. A namespace without an ``object_layout`` says nothing.
    """
    said = storage.namespace
    if not said.object_layout:
        return
    for field in ("attention", "dtype", "object_layout", "page_size", "layers", "heads", "head_dim", "ranks"):
        there, here = getattr(said, field), getattr(expected, field)
        if there != here:
            raise SettingsError(
                f"the storage was opened for pages with {field} {there}, and mem_layout {mem_layout} of this "
                f"shape stores {here}; open it with shape.namespace(page_size, {mem_layout!r}), or that of "
                "the shard where there are ranks"
            )


def _register(storage: HiCacheStorage, buffers: Sequence[Buffer]) -> None:
    for number, buffer in enumerate(buffers):
        try:
            storage.register_buffer(buffer)
        except BaseException:
            _unregister(storage, buffers[:number])
            if advice := memlock_shortage(sum(buffer.nbytes for buffer in buffers)):
                logger.warning("the storage did not register L2, perhaps for this: %s", advice)
            raise


def _unregister(storage: HiCacheStorage, buffers: Sequence[Buffer]) -> None:
    for buffer in buffers:
        try:
            storage.unregister_buffer(buffer)
        except Exception as error:
            logger.warning("storage failed to unregister L2: %s: %s", type(error).__name__, error)
