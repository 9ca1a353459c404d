"""HiRadixTree: which pages are in L1 and L2, as one tree over token prefixes.

A node is a page, found below its parent by its page hash. In each tier the resident pages of any
path are a prefix of the path: a page whose predecessors are gone could never be used. Eviction keeps
that for O(1) a page by the order of one queue a tier: only pages that nobody uses are queued, and a
path is let go leaf first, so that a page always stands before its parent.

L3 is not mirrored: whether it has a page is its own to say. A node only remembers that its page was
stored or came from there (``in_l3``). A page in neither L1 nor L2 has no node.

One thread at a time. The tree knows slots by number only; the pools own them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from enum import IntEnum
from itertools import islice

from hicache_storage.engine.page_objects import KV, Parts


class Tier(IntEnum):
    """The tiers that have slots."""

    L1 = 0
    L2 = 1


class Node:
    """One page: where it is, with which parts, and who uses it.

    ``slots``, ``parts`` and ``pins`` are indexed by Tier; see ``page_objects`` for parts, of which L3 has
    those in ``stored``. ``hits`` counts the requests that have used the page.
    """

    __slots__ = (
        "backing_up",
        "children",
        "hits",
        "page_hash",
        "parent",
        "parts",
        "pins",
        "slots",
        "stored",
    )

    def __init__(self, page_hash: str, parent: Node | None) -> None:
        self.page_hash = page_hash
        self.parent = parent
        self.children: dict[str, Node] = {}
        self.slots: list[int | None] = [None, None]
        self.parts: list[Parts] = [0, 0]
        self.pins = [0, 0]
        self.hits = 0
        self.stored: Parts = 0
        self.backing_up: Parts = 0

    @property
    def in_l3(self) -> bool:
        """Whether the page was stored or came from there; its side pools' parts need not have been."""
        return bool(self.stored & KV)

    def slot(self, tier: Tier) -> int:
        """The slot in a tier where the page is known to be."""
        slot = self.slots[tier]
        assert slot is not None
        return slot


class HiRadixTree:
    """Nodes by prefix, and one least-recently-used queue a tier over those that nobody uses."""

    def __init__(self) -> None:
        self.root = Node("", None)
        self._lru: tuple[OrderedDict[Node, None], ...] = tuple(OrderedDict() for _ in Tier)

    def match(self, hashes: Sequence[str]) -> list[Node]:
        """The nodes of the longest known prefix of ``hashes``, root first."""
        path = []
        node: Node | None = self.root
        for page_hash in hashes:
            assert node is not None
            node = node.children.get(page_hash)
            if node is None:
                break
            path.append(node)
        return path

    def extend(self, path: list[Node], page_hash: str, tier: Tier, slot: int) -> None:
        """Add the page after ``path``, resident in ``tier``, as its new and pinned last node.

        The path must be pinned in both tiers and resident in ``tier``.
        """
        parent = path[-1] if path else self.root
        node = Node(page_hash, parent)
        node.pins = [1, 1]
        parent.children[page_hash] = node
        path.append(node)
        self.place(node, tier, slot)

    def place(self, node: Node, tier: Tier, slot: int) -> None:
        """Record that the page is in ``slot`` too. Node pinned there; parent resident there."""
        parent = node.parent
        assert node.pins[tier] > 0
        assert node.slots[tier] is None
        assert parent is not None
        assert parent is self.root or parent.slots[tier] is not None
        node.slots[tier] = slot
        node.parts[tier] = KV

    def pin(self, path: Sequence[Node], tier: Tier) -> None:
        """Keep a path, given from the root on, from being evicted from ``tier``.

        Several paths can be given as one: pages before their children, each page once.
        """
        lru = self._lru[tier]
        for node in path:
            if node.pins[tier] == 0:
                lru.pop(node, None)
            node.pins[tier] += 1

    def unpin(self, path: Sequence[Node], tier: Tier) -> None:
        """Take back one ``pin`` of the same path; what nobody else uses was used just now."""
        lru = self._lru[tier]
        for node in reversed(path):
            node.pins[tier] -= 1
            if node.pins[tier] == 0 and node.slots[tier] is not None:
                lru[node] = None

    def evict(self, tier: Tier) -> tuple[Node, int] | None:
        """Take the least recently used page out of ``tier``: its node and the slot it leaves.

        None when every page is in use. The node leaves the tree with its last slot.
        """
        if not self._lru[tier]:
            return None
        node, _ = self._lru[tier].popitem(last=False)
        slot = node.slot(tier)
        node.slots[tier] = None
        node.parts[tier] = 0
        if node.slots == [None, None]:
            assert node.parent is not None
            del node.parent.children[node.page_hash]
        return node, slot

    def oldest(self, tier: Tier, count: int) -> list[Node]:
        """The pages that would leave ``tier`` next, in that order."""
        return list(islice(self._lru[tier], count))

    def path(self, node: Node) -> list[Node]:
        """The pages up to ``node``, root first."""
        path = [node]
        while (parent := path[-1].parent) is not None and parent is not self.root:
            path.append(parent)
        return path[::-1]

    def nodes(self) -> Iterator[Node]:
        """All nodes, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
