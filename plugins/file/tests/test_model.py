"""The store against a dict: whatever is done to it, a page is what was stored or it is not there."""

import os
import random
import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hicache_storage import Buffer, Namespace, Status
from hicache_storage_file import FileSettings, FileStorage

NAMES = [f"page-{i}" for i in range(12)]
NAMESPACES = [Namespace(model="a"), Namespace(model="b")]
CAPACITY = 40_000

names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True)
namespaces = st.sampled_from(NAMESPACES)


def content(namespace, name):
    """What a page holds follows from its key, sizes included."""
    chance = random.Random(namespace.model + name)
    return chance.randbytes(chance.choice([1, 100, 4096, 5000]))


def page_of(data):
    middle = len(data) // 3
    memory = Buffer.of(bytearray(data))
    return [memory.slice(0, middle), memory.slice(middle, len(data) - middle)]


class StoreMachine(RuleBasedStateMachine):
    """``model`` holds the keys that may be there; a crash, an eviction or damage may take any away."""

    @initialize(small=st.booleans())
    def start(self, small):
        self.root = Path(tempfile.mkdtemp(prefix="hicache-model-"))
        self.settings = FileSettings(
            root=self.root, capacity=CAPACITY if small else "1GB", min_free=0, threads=2
        )
        self.small = small
        self.model = set()
        self.abandoned = []
        self.storages = [self.open(), self.open()]

    def open(self):
        return FileStorage(self.settings, NAMESPACES[0])

    @rule(namespace=namespaces, names=names, who=st.integers(0, 1))
    def store(self, namespace, names, who):
        keys = [namespace.key(name) for name in names]
        pages = [page_of(content(namespace, name)) for name in names]
        statuses = self.storages[who].batch_set_from(keys, pages)
        assert all(statuses)
        self.model.update(keys)

    @rule(namespace=namespaces, names=names, who=st.integers(0, 1))
    def load(self, namespace, names, who):
        keys = [namespace.key(name) for name in names]
        pages = [page_of(bytes(len(content(namespace, name)))) for name in names]
        for key, name, page, status in zip(
            keys, names, pages, self.storages[who].batch_get_into(keys, pages), strict=True
        ):
            if status:
                assert key in self.model
                assert b"".join(buffer.view for buffer in page) == content(namespace, name)
            else:
                assert status is Status.MISSING
                assert self.small or key not in self.model

    @rule(namespace=namespaces, name=st.sampled_from(NAMES), who=st.integers(0, 1))
    def load_one(self, namespace, name, who):
        value = self.storages[who].get(namespace.key(name))
        assert value is None or bytes(value) == content(namespace, name)
        assert (value is not None) == (namespace.key(name) in self.model) or self.small

    @rule(namespace=namespaces, names=names, who=st.integers(0, 1))
    def look_up(self, namespace, names, who):
        keys = [namespace.key(name) for name in names]
        for key, found in zip(keys, self.storages[who].batch_exists(keys), strict=True):
            assert found == (key in self.model) or (self.small and not found)

    @rule(namespace=namespaces, names=names, who=st.integers(0, 1))
    def delete(self, namespace, names, who):
        keys = [namespace.key(name) for name in names]
        self.storages[who].delete(keys)
        self.model.difference_update(keys)

    @rule(who=st.integers(0, 1))
    def clear(self, who):
        self.storages[who].clear()
        self.model = {key for key in self.model if not key.startswith(NAMESPACES[0].digest)}

    @rule(who=st.integers(0, 1))
    def reopen(self, who):
        self.storages[who].close()
        self.storages[who] = self.open()

    @rule(who=st.integers(0, 1))
    def crash(self, who):
        """Another one takes over while the old one is neither closed nor used again."""
        self.abandoned.append(self.storages[who])
        self.storages[who] = self.open()

    @rule(namespace=namespaces, name=st.sampled_from(NAMES))
    def lose_a_file(self, namespace, name):
        for path in (self.root / namespace.digest).glob(f"??/{name}"):
            os.unlink(path)
        self.model.discard(namespace.key(name))

    @rule()
    def recount(self):
        self.storages[0]._opened.directory._usage.recount()

    @invariant()
    def stays_within_its_limits(self):
        if hasattr(self, "root") and self.small:
            assert sum(path.stat().st_size for path in self.files()) <= CAPACITY

    @invariant()
    def holds_nothing_but_pages_that_were_stored(self):
        if hasattr(self, "root"):
            assert {f"{path.parts[-3]}/{path.name}" for path in self.files()} <= self.model

    def files(self):
        return [path for path in self.root.glob("[!.]*/??/*") if path.exists()]

    def teardown(self):
        if hasattr(self, "root"):
            for storage in [*self.storages, *self.abandoned]:
                storage.close()
            shutil.rmtree(self.root)


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=int(os.environ.get("HICACHE_FILE_MODEL_EXAMPLES", "40")),
    stateful_step_count=25,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
