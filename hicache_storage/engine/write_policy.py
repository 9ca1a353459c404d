"""When a page is copied from L1 to L2; whatever is in L2 goes on to L3 at once.

As in SGLang 0.5.23 (``unified_cache/unified_tree_core.py``) a page counts the requests that used
it, the one that computed it included, and is copied when it has as many as the policy asks for::

    write_through             1    after the request that computed it
    write_through_selective   2    after the second request that used it; if L1 lets go of it
                                   before, it is gone
    write_back                -    when L1 lets go of it

A page is never copied without the pages before it, since nobody could use it without them: those
have been used as often, and under write_back they go down along with it. SGLang copies the one page,
and has to look after pages below a page that is not there (its issue 19212 is one of the crashes).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, takewhile

from hicache_storage.engine.radix import HiRadixTree, Node

WRITE_POLICIES: dict[str, int | None] = {
    "write_through": 1,
    "write_through_selective": 2,
    "write_back": None,
}
"""How many requests make a page worth a copy; None: its eviction from L1 does."""


def use(path: Sequence[Node], hits_to_copy: int | None) -> list[Node]:
    """Count a request's use of its pages; the leading ones that have enough of them for a copy."""
    for node in path:
        node.hits += 1
    if hits_to_copy is None:
        return []
    return list(takewhile(lambda node: node.hits >= hits_to_copy, path))


def with_prefixes(tree: HiRadixTree, nodes: Sequence[Node]) -> list[Node]:
    """Pages and all pages before them, each once and after its parent."""
    return list(dict.fromkeys(chain.from_iterable(map(tree.path, nodes))))
