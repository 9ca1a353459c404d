"""Memory layouts of a page pool: in which order the axes of the KV cache lie in memory.

A layout is nothing but that order. The strided view that transfers use, the pieces of a page, and
the bytes of its object all follow from where the ``page`` axis stands::

    layer_first         kv layer PAGE token head dim     2 x layers pieces a page (MLA: layers)
    page_first          kv PAGE token layer head dim     2 pieces (MLA: 1)
    page_first_direct   kv PAGE layer token head dim     2 pieces (MLA: 1)
    page_head           kv PAGE head token layer dim     2 pieces (no MLA: it has one head)

The names and orders are SGLang's (``mem_cache/pool_host``). MLA has a ``kv`` axis of size 1.
In ``page_head`` the heads of a page are neighbours, so that ranks with fewer heads each read theirs
as one run of the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    import torch

CANONICAL = ("page", "kv", "layer", "token", "head", "dim")
"""The order of axes in which every pool is seen, whatever its memory looks like."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An order of the six axes; ``dim`` is always innermost."""

    name: str
    axes: tuple[str, ...]
    attentions: tuple[str, ...] = ("mha", "mla")
    """Whose KV has this layout in SGLang."""

    @property
    def object_layout(self) -> str:
        """Order of axes in a page's stored bytes: the memory order without the page axis.

        The pieces of a page are stored one after the other, so ``layer_first`` and
        ``page_first_direct`` store the same bytes.
        """
        return ",".join(axis for axis in self.axes if axis != "page")

    def pieces(self, sizes: dict[str, int]) -> int:
        """Contiguous pieces that one page consists of: what lies outside the page axis."""
        return prod(sizes[axis] for axis in self.axes[: self.axes.index("page")])

    def canonical(self, memory: torch.Tensor, sizes: dict[str, int]) -> torch.Tensor:
        """``memory``, flat and in this layout, as a view with the axes in CANONICAL order."""
        view = memory.view([sizes[axis] for axis in self.axes])
        return view.permute([self.axes.index(axis) for axis in CANONICAL])


LAYER_FIRST = Layout("layer_first", ("kv", "layer", "page", "token", "head", "dim"))
PAGE_FIRST = Layout("page_first", ("kv", "page", "token", "layer", "head", "dim"))
PAGE_FIRST_DIRECT = Layout("page_first_direct", ("kv", "page", "layer", "token", "head", "dim"))
PAGE_HEAD = Layout("page_head", ("kv", "page", "head", "token", "layer", "dim"), attentions=("mha",))

LAYOUTS = {layout.name: layout for layout in (LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD)}


def find_layout(name: str, attention: str | None = None) -> Layout:
    """The layout called ``name``, which KV of ``attention`` (None: any) can have.

    Raises SettingsError naming the choices, or why there is no such layout for the attention.
    """
    if name not in LAYOUTS:
        raise SettingsError(f"mem_layout {name!r} is none of: {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    if attention is not None and attention not in layout.attentions:
        choices = [other.name for other in LAYOUTS.values() if attention in other.attentions]
        raise SettingsError(
            f"mem_layout {name} orders a page by KV heads, which {attention} has not; "
            f"choose one of: {', '.join(choices)}"
        )
    return layout
