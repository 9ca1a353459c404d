"""Whatever policy, order of requests and storage: right bytes, every slot accounted for, no standstill."""

import time
from concurrent.futures import ThreadPoolExecutor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from hicache_storage import BusyError, Status, UnavailableError
from hicache_storage.engine import KVShape, TierEngine
from hicache_storage.engine.radix import Tier
from hicache_storage.engine.side_pools import SidePool
from hicache_storage.engine.write_policy import WRITE_POLICIES
from tests.engine.conftest import MemoryStorage

SHAPE = KVShape.parse("mla:1x4:bf16")
PAGE = 2
L1_PAGES = 8
LONG = 30.0
"""Seconds after which an engine stands still: no storage here takes more than milliseconds a call."""

prompts = st.text("ab", min_size=1, max_size=4).map(
    lambda text: [ord(letter) * 10 + token for letter in text for token in range(2 * PAGE)]
)


class MoodyStorage(MemoryStorage):
    """Well, slow, down, forgetful, or half-hearted; the bytes it gives are right."""

    mood = "well"

    def _disturb(self, method, key):
        if self.mood == "slow":
            time.sleep(0.003)
        if self.mood == "down":
            raise UnavailableError("down")

    def batch_exists(self, keys):
        found = super().batch_exists(keys)
        return [*found[:-1], False] if self.mood == "forgetful" else found

    def batch_get_into(self, keys, pages):
        statuses = super().batch_get_into(keys, pages)
        return [*statuses[:-1], Status.FAILED] if self.mood == "half-hearted" else statuses

    def batch_set_from(self, keys, pages):
        statuses = super().batch_set_from(keys[::2], pages[::2]) if self.mood == "half-hearted" else None
        return statuses or super().batch_set_from(keys, pages)


class EngineMachine(RuleBasedStateMachine):
    """Requests of a few prompts on an engine of a few pages."""

    waiting = Bundle("waiting")

    @initialize(
        write_policy=st.sampled_from(list(WRITE_POLICIES)),
        prefetch_policy=st.sampled_from(["best_effort", "wait_complete", "timeout"]),
        hicache_ratio=st.sampled_from([1.2, 1.5, 3.0]),
        side_pools=st.sampled_from(
            [[], [SidePool.mamba(SHAPE)], [SidePool.swa(SHAPE, 2), SidePool.indexer(SHAPE)]]
        ),
    )
    def open(self, write_policy, prefetch_policy, hicache_ratio, side_pools):
        self.threads = ThreadPoolExecutor(1)
        self.storage = MoodyStorage()
        self.engine = TierEngine(
            SHAPE,
            PAGE,
            l1_tokens=L1_PAGES * PAGE,
            storage=self.storage,
            write_policy=write_policy,
            prefetch_policy=prefetch_policy,
            hicache_ratio=hicache_ratio,
            side_pools=side_pools,
            prefetch_threshold=PAGE,
            prefetch_timeout_base=0.005,
            backup_wait=0.002,
        )
        self.held = []

    def call(self, method, *arguments):
        """The answer of the engine; it must not keep anybody waiting."""
        return self.threads.submit(method, *arguments).result(LONG)

    @rule(tokens=prompts)
    def run(self, tokens):
        report = self.call(self.engine.prefill, tokens)
        assert report.wrong_bytes == 0
        assert len(report.sources) == len(tokens) // PAGE

    @rule(target=waiting, tokens=prompts)
    def wait(self, tokens):
        prefetch = self.call(self.engine.prefetch, tokens)
        self.held.append(prefetch)
        return tokens, prefetch

    @rule(request=consumes(waiting))
    def run_waiting(self, request):
        assert self.call(self.engine.prefill, *request).wrong_bytes == 0
        self.held.remove(request[1])

    @rule(request=consumes(waiting))
    def give_up(self, request):
        self.call(self.engine.cancel, request[1])
        self.held.remove(request[1])

    @rule(mood=st.sampled_from(["well", "well", "slow", "down", "forgetful", "half-hearted"]))
    def change_mood(self, mood):
        self.storage.mood = mood

    @rule()
    def let_go_of_l1(self):
        self.call(self.engine.flush_l1)

    @rule()
    def let_go_of_l2(self):
        self.call(self.engine.flush_l2)

    @rule()
    def lose_half_of_l3(self):
        for key in list(self.storage.pages)[::2]:
            self.storage.pages.pop(key, None)

    @rule()
    def detach_and_attach_another(self):
        try:
            self.call(self.engine.detach)
        except BusyError:
            return
        assert self.storage.registered == []
        self.storage = MoodyStorage()
        self.call(self.engine.attach, self.storage)

    @rule()
    def account_for_every_slot(self):
        assert self.call(self.engine.wait_for_backup, LONG)
        tiers = self.engine._tiers
        in_flight = [slot for held in self.held if held.operation for slot in held.operation.slots]
        nodes = list(tiers.tree.nodes())
        for tier, pool, elsewhere in ((Tier.L1, tiers.l1, []), (Tier.L2, tiers.l2, in_flight)):
            used = [node.slots[tier] for node in nodes if node.slots[tier] is not None]
            assert sorted(used + pool._free + elsewhere) == list(range(pool.slots))

    @invariant()
    def there_are_no_holes(self):
        tree = self.engine._tiers.tree
        for node in tree.nodes():
            for tier in Tier:
                if node.slots[tier] is not None and node.parent is not tree.root:
                    assert node.parent.slots[tier] is not None

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        for held in self.held:
            self.call(self.engine.cancel, held)
        self.held = []
        self.account_for_every_slot()
        self.let_go_of_l1()
        assert self.call(self.engine.wait_for_backup, LONG)
        self.let_go_of_l2()
        assert (self.engine.stats.l1_resident, self.engine.stats.l2_resident) == (0, 0)
        self.call(self.engine.close)
        assert self.storage.registered == []
        self.threads.shutdown()


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
