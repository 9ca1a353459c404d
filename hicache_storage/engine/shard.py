"""Which part of a model's KV one rank holds, and under which names it is stored.

Tensor parallel ranks hold some heads of MHA each, and all of MLA, whose pages one rank writes and
all read. Pipeline stages hold some layers each.

With ``tp_lcm_size``, a common multiple of the tp sizes that share L3, a page is stored by slices of
heads; see ``layers.head_slices``. Only ``page_head`` keeps the heads of a page apart in memory. Named and
meant as in SGLang 0.5.23 (``should_split_heads``, ``get_split_heads_page_buffer_meta``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hicache_storage.engine.layouts import find_layout
from hicache_storage.engine.ranks import Place
from hicache_storage.engine.shape import KVShape
from hicache_storage.errors import SettingsError
from hicache_storage.layers.head_slices import HeadSlicesLayer
from hicache_storage.namespace import Namespace
from hicache_storage.storage import HiCacheStorage

_ALONE = Place()


@dataclass(frozen=True, slots=True)
class Shard:
    """What the rank at ``place`` holds of the pages of a whole ``model``.

    Raises SettingsError when layers or heads cannot be cut that way.
    """

    model: KVShape
    place: Place = _ALONE
    tp_lcm_size: int | None = None
    """Head slices of a page over all ranks; None: a rank's page is one object, whatever its heads."""

    def __post_init__(self) -> None:
        model, place = self.model, self.place
        if place.pp_size > model.layers:
            raise SettingsError(f"pp_size {place.pp_size} is more than the {model.layers} layers of {model}")
        if self.is_replicated:
            return
        cuts = {"tp_size": place.tp_size, "tp_lcm_size": self.tp_lcm_size or 1}
        for name, cut in cuts.items():
            if model.heads % cut:
                raise SettingsError(f"{name} {cut} does not divide the {model.heads} heads of {model}")
        if self.tp_lcm_size is not None and self.tp_lcm_size % place.tp_size:
            raise SettingsError(
                f"tp_lcm_size {self.tp_lcm_size} is not a multiple of tp_size {place.tp_size}"
            )

    @property
    def is_replicated(self) -> bool:
        """Whether all tensor parallel ranks hold the same bytes."""
        return self.model.attention == "mla"

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes its pages to L3; of those that hold the same, one does."""
        return not self.is_replicated or self.place.tp_rank == 0

    @property
    def layers(self) -> range:
        """The rank's layers."""
        rank, size, count = self.place.pp_rank, self.place.pp_size, self.model.layers
        return range(count * rank // size, count * (rank + 1) // size)

    @property
    def heads(self) -> range:
        """The rank's heads."""
        if self.is_replicated:
            return range(self.model.heads)
        count = self.model.heads // self.place.tp_size
        return range(count * self.place.tp_rank, count * (self.place.tp_rank + 1))

    @property
    def shape(self) -> KVShape:
        """The shape of the rank's pages."""
        return replace(self.model, layers=len(self.layers), heads=len(self.heads))

    @property
    def slices(self) -> range:
        """The head slices of the rank, of ``tp_lcm_size``; empty when heads are not split."""
        if self.is_replicated or self.tp_lcm_size is None:
            return range(0)
        count = self.tp_lcm_size // self.place.tp_size
        return range(count * self.place.tp_rank, count * (self.place.tp_rank + 1))

    def sliced(self, storage: HiCacheStorage) -> HiCacheStorage:
        """``storage`` for whole pages of this rank, kept by slices of heads where these are split."""
        if not self.slices:
            return storage
        return HeadSlicesLayer(storage, self.slices, self.tp_lcm_size or 1)

    def namespace(self, page_size: int, mem_layout: str, **identity: Any) -> Namespace:
        """The identity of the rank's pages; ``identity`` adds fields such as ``model=``.

        Raises SettingsError when heads are to be split in a layout that does not keep them apart.
        """
        shape, ranks = self.shape, [("tp", self.place.tp_rank, self.place.tp_size)]
        if self.slices:
            self.check_layout(mem_layout)
            shape, ranks = replace(shape, heads=shape.heads // len(self.slices)), []
        if self.is_replicated or self.place.tp_size == 1:
            ranks = []
        whole = shape.namespace(page_size, mem_layout, ranks=tuple(ranks), **identity)
        return replace(whole, layers=(self.layers.start, self.layers.stop))

    def check_layout(self, mem_layout: str) -> None:
        """Raise SettingsError unless pages in this layout can be cut as the shard says."""
        axes = find_layout(mem_layout).axes
        if self.slices and axes[axes.index("page") + 1] != "head":
            raise SettingsError(f"tp_lcm_size needs mem_layout page_head, not {mem_layout}")
