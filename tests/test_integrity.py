"""Bytes that cannot be proved are a miss, once."""

import random

import pytest

from hicache_conformance.pages import GuardedPages
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Capabilities, CorruptError, Namespace, Status
from hicache_storage.header import PLAIN_NBYTES, header_nbytes, unpack
from hicache_storage.layers.faults import FaultPlan, FaultsLayer
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage.page_hook import page_work

SPACE = Namespace(model="m")
KEYS = SPACE.keys([f"page{i}" for i in range(4)])


@pytest.fixture
def inner():
    return ReferenceStorage(None, SPACE)


@pytest.fixture
def storage(inner):
    with IntegrityLayer(inner) as layer:
        yield layer


@pytest.fixture
def memory(storage):
    pages = GuardedPages(4, [100, 28])
    pages.fill(seed=3)
    assert all(storage.batch_set_from(KEYS, pages.pages))
    return pages


def damage(kind, store, key, rng):
    """Damage one stored object the way a disk, a crash or another program does."""
    raw = bytearray(store[key])
    if kind == "bit flip":
        bit = rng.randrange(len(raw) * 8)
        raw[bit // 8] ^= 1 << bit % 8
    elif kind == "truncated":
        del raw[rng.randrange(len(raw)) :]
    elif kind == "zero filled":
        start = rng.randrange(len(raw) - 1)
        raw[start:] = bytes(len(raw) - start)
    elif kind == "swapped":
        other = rng.choice([k for k in store if k != key])
        raw = bytearray(store[other])
    elif kind == "extended":
        raw += rng.randbytes(rng.randrange(1, 100))
    store[key] = bytes(raw)


@pytest.mark.parametrize("kind", ["bit flip", "truncated", "zero filled", "swapped", "extended"])
def test_a_damaged_object_is_a_miss_once_and_the_next_set_heals_it(kind, inner, storage, memory):
    rng = random.Random(5)
    good = memory.content(1)
    for _ in range(400):
        before = inner.store[KEYS[1]]
        damage(kind, inner.store, KEYS[1], rng)
        if inner.store[KEYS[1]] == before:
            continue  # zeros over zeros
        memory.blank()
        assert storage.batch_get_into(KEYS, memory.pages) == [
            Status.OK,
            Status.CORRUPT,
            Status.OK,
            Status.OK,
        ]
        assert not storage.exists(KEYS[1])
        storage.set(KEYS[1], memoryview(good))
        assert storage.batch_get_into([KEYS[1]], [memory.pages[1]]) == [Status.OK]
        assert memory.content(1) == good


def test_an_object_of_another_namespace_is_not_served(inner, storage, memory):
    foreign = Namespace(model="other").key("page0")
    IntegrityLayer(inner).set(foreign, memoryview(memory.content(0)))
    inner.store[KEYS[0]] = inner.store[foreign]
    assert storage.batch_get_into([KEYS[0]], [memory.pages[0]]) == [Status.CORRUPT]


def test_get_and_set_speak_the_same_format_as_the_batches(inner, storage, memory):
    assert bytes(storage.get(KEYS[2])) == memory.content(2)
    storage.set(KEYS[3], memoryview(memory.content(2)))
    assert storage.batch_get_into([KEYS[3]], [memory.pages[0]]) == [Status.OK]
    assert memory.content(0) == memory.content(2)
    inner.store[KEYS[2]] = inner.store[KEYS[2]][:-1]
    with pytest.raises(CorruptError, match="page2"):
        storage.get(KEYS[2])
    assert storage.get(KEYS[2]) is None


class Aligned(ReferenceStorage):
    """Sees how its batches are aligned, and what memory was announced."""

    capabilities = Capabilities(delete=True, alignment=4096)

    def __init__(self, *args):
        super().__init__(*args)
        self.seen = []
        self.registered = []

    def register_buffer(self, buffer):
        self.registered.append(buffer)

    def unregister_buffer(self, buffer):
        self.registered.remove(buffer)

    def batch_set_from(self, keys, pages):
        self.seen += [buffer for page in pages for buffer in page]
        assert all(any(r.contains(page[0]) for r in self.registered) for page in pages)
        return super().batch_set_from(keys, pages)


def test_the_header_keeps_an_aligned_page_aligned_and_lies_in_registered_memory():
    inner = Aligned(None, SPACE)
    layer = IntegrityLayer(inner)
    memory = GuardedPages(2, [8192])
    assert all(layer.batch_set_from(KEYS[:2], memory.pages))
    headers = inner.seen[::2]
    assert [header.nbytes for header in headers] == [4096, 4096]
    assert all(header.address % 4096 == 0 for header in headers)
    layer.close()
    assert inner.registered == []


def test_the_header_of_an_unaligned_page_is_small():
    assert header_nbytes(1000, 4096) == PLAIN_NBYTES
    assert header_nbytes(8192, 4096) == 4096
    assert header_nbytes(8192, 1) == PLAIN_NBYTES


def test_the_header_says_what_it_is_about(inner, storage, memory):
    header = unpack(inner.store[KEYS[0]])
    assert header is not None
    assert header.payload_nbytes == 128
    assert header.namespace_digest == SPACE.digest
    assert unpack(b"something else") is None


def test_batches_larger_than_one_thread_hashes_are_verified_too(inner, storage):
    memory = GuardedPages(4, [4 << 20])
    memory.fill(seed=4)
    assert all(storage.batch_set_from(KEYS, memory.pages))
    raw = bytearray(inner.store[KEYS[3]])
    raw[-1] ^= 1
    inner.store[KEYS[3]] = bytes(raw)
    assert storage.batch_get_into(KEYS, memory.pages)[2:] == [Status.OK, Status.CORRUPT]


class Hooked(ReferenceStorage):
    """Runs the page hook as a fast backend does, and counts it."""

    capabilities = Capabilities(delete=True, page_hook=True)
    ran = 0

    def batch_get_into(self, keys, pages):
        work = page_work()
        statuses = super().batch_get_into(keys, pages)
        for i, status in enumerate(statuses):
            if status:
                work(i)
                self.ran += 1
        return statuses

    def batch_set_from(self, keys, pages):
        work = page_work()
        for i in range(len(keys)):
            work(i)
        return super().batch_set_from(keys, pages)


def test_a_backend_with_the_page_hook_is_verified_in_it():
    inner = Hooked(None, SPACE)
    memory = GuardedPages(4, [100, 28])
    memory.fill(seed=3)
    with IntegrityLayer(inner) as layer:
        assert all(layer.batch_set_from(KEYS, memory.pages))
        inner.store[KEYS[2]] = inner.store[KEYS[1]]
        assert layer.batch_get_into(KEYS, memory.pages) == [Status.OK, Status.OK, Status.CORRUPT, Status.OK]
        assert inner.ran == 4
        assert page_work()(0) is None, "the hook ended with the call"


def test_a_layer_in_between_switches_the_hook_off_because_it_may_change_pages():
    inner = Hooked(None, SPACE)
    memory = GuardedPages(4, [100, 28])
    memory.fill(seed=3)
    with IntegrityLayer(FaultsLayer(inner, FaultPlan(flip_rate=1))) as layer:
        assert all(layer.batch_set_from(KEYS, memory.pages))
        assert layer.batch_get_into(KEYS, memory.pages) == [Status.CORRUPT] * 4


class Forgetful(ReferenceStorage):
    """Declares the page hook and never runs it on what it reads."""

    capabilities = Capabilities(delete=True, page_hook=True)

    def batch_set_from(self, keys, pages):
        work = page_work()
        for i in range(len(keys)):
            work(i)
        return super().batch_set_from(keys, pages)


def test_a_page_that_the_hook_left_out_is_verified_all_the_same():
    inner = Forgetful(None, SPACE)
    memory = GuardedPages(4, [100, 28])
    memory.fill(seed=3)
    with IntegrityLayer(inner) as layer:
        assert all(layer.batch_set_from(KEYS, memory.pages))
        inner.store[KEYS[2]] = inner.store[KEYS[1]]
        assert layer.batch_get_into(KEYS, memory.pages) == [Status.OK, Status.OK, Status.CORRUPT, Status.OK]
