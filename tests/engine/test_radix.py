"""HiRadixTree: no holes whatever happens, and least recently used leaves first."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hicache_storage.engine.radix import HiRadixTree, Tier

CAPACITY = {Tier.L1: 5, Tier.L2: 7}

prefixes = st.text("ab", min_size=1, max_size=4)


def hashes_of(text):
    return [text[: end + 1] for end in range(len(text))]


class TreeMachine(RuleBasedStateMachine):
    """Requests come and go on a tree whose tiers have a few slots; a model says who must leave."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.tree = HiRadixTree()
        self.free = {tier: list(range(CAPACITY[tier])) for tier in Tier}
        self.clock = 0
        self.last_use = {tier: {} for tier in Tier}
        self.pins = {tier: {} for tier in Tier}

    def pin(self, path, tier):
        self.tree.pin(path, tier)
        for node in path:
            self.pins[tier][node.page_hash] = self.pins[tier].get(node.page_hash, 0) + 1

    def unpin(self, path, tier):
        self.tree.unpin(path, tier)
        self.clock += 1
        for node in path:
            self.pins[tier][node.page_hash] -= 1
            if self.pins[tier][node.page_hash] == 0:
                self.last_use[tier][node.page_hash] = self.clock

    def resident(self, tier):
        return {node.page_hash: node for node in self.tree.nodes() if node.slots[tier] is not None}

    def slot(self, tier):
        """A free slot, or the one of the page that the model names: the longest unused, deepest first."""
        if self.free[tier]:
            return self.free[tier].pop()
        candidates = [name for name in self.resident(tier) if not self.pins[tier].get(name)]
        evicted = self.tree.evict(tier)
        if not candidates:
            assert evicted is None
            return None
        node, slot = evicted
        assert node.page_hash == min(candidates, key=lambda n: (self.last_use[tier][n], -len(n)))
        return slot

    @rule(target=held, text=prefixes)
    def request(self, text):
        """Bring a path into L1 and L2, as far as there is room, and keep it in use."""
        path = self.tree.match(hashes_of(text))
        for tier in Tier:
            self.pin(path, tier)
        for node in path:
            if node.slots[Tier.L1] is None and (slot := self.slot(Tier.L1)) is not None:
                self.tree.place(node, Tier.L1, slot)
            elif node.slots[Tier.L1] is None:
                break
        for name in hashes_of(text)[len(path) :]:
            if path and path[-1].slots[Tier.L1] is None:
                break
            if (slot := self.slot(Tier.L1)) is None:
                break
            self.tree.extend(path, name, Tier.L1, slot)
            for tier in Tier:
                self.pins[tier][name] = self.pins[tier].get(name, 0) + 1
        for node in path:
            if node.slots[Tier.L2] is None:
                if (slot := self.slot(Tier.L2)) is None:
                    break
                self.tree.place(node, Tier.L2, slot)
        return path

    @rule(path=consumes(held))
    def end_request(self, path):
        for tier in Tier:
            self.unpin(path, tier)

    @rule(target=held, path=held)
    def use_again(self, path):
        for tier in Tier:
            self.pin(path, tier)
        return path

    @rule(tier=st.sampled_from(Tier))
    def give_up_one(self, tier):
        candidates = [name for name in self.resident(tier) if not self.pins[tier].get(name)]
        evicted = self.tree.evict(tier)
        assert (evicted is None) == (not candidates)
        if evicted is not None:
            self.free[tier].append(evicted[1])

    @invariant()
    def there_are_no_holes(self):
        for node in self.tree.nodes():
            assert node.slots != [None, None]
            for tier in Tier:
                if node.slots[tier] is not None and node.parent is not self.tree.root:
                    assert node.parent.slots[tier] is not None

    @invariant()
    def every_slot_is_free_or_holds_one_page(self):
        for tier in Tier:
            used = [node.slots[tier] for node in self.resident(tier).values()]
            assert sorted(used + self.free[tier]) == list(range(CAPACITY[tier]))

    @invariant()
    def pages_in_use_stay(self):
        known = {node.page_hash for node in self.tree.nodes()}
        for tier in Tier:
            assert known >= {name for name, pins in self.pins[tier].items() if pins}


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_a_path_is_found_as_far_as_it_is_known():
    tree = HiRadixTree()
    path = []
    for slot, name in enumerate(hashes_of("aab")):
        tree.extend(path, name, Tier.L1, slot)
    assert [node.page_hash for node in tree.match(hashes_of("aaba"))] == ["a", "aa", "aab"]
    assert [node.page_hash for node in tree.match(hashes_of("abb"))] == ["a"]
    assert tree.match(hashes_of("b")) == []
