"""Pages kept by slices of heads: the same objects whoever holds the heads."""

import random

import pytest

from hicache_storage import Buffer, BufferMismatchError, Capabilities, HiCacheStorage, Namespace, Status
from hicache_storage.layers.head_slices import HeadSlicesLayer

HEADS, HEAD_NBYTES = 8, 6
KV = random.Random(1).randbytes(2 * HEADS * HEAD_NBYTES)
"""Of one page on a rank that has all heads: keys head by head, then values."""


class Dict(HiCacheStorage):
    capabilities = Capabilities(delete=True)

    def __init__(self):
        super().__init__(None, Namespace())
        self.pages = {}

    def get(self, key):
        return self.pages.get(key)

    def exists(self, key):
        return key in self.pages

    def set(self, key, value):
        self.pages[key] = bytes(value)

    def delete(self, keys):
        for key in keys:
            self.pages.pop(key, None)


def ranks(storage, tp, count=4):
    """The storage as each of ``tp`` ranks sees it, and that rank's page."""
    half, heads = HEADS * HEAD_NBYTES, HEADS // tp * HEAD_NBYTES
    for rank in range(tp):
        slices = range(count // tp * rank, count // tp * (rank + 1))
        keys, values = (
            KV[rank * heads : (rank + 1) * heads],
            KV[half + rank * heads : half + (rank + 1) * heads],
        )
        yield HeadSlicesLayer(storage, slices, count), keys + values


def page(content, cuts):
    """The content in buffers that end at ``cuts``."""
    edges = zip([0, *cuts], [*cuts, len(content)], strict=True)
    return [Buffer.of(bytearray(content[begin:end])) for begin, end in edges]


def content(buffers):
    return b"".join(bytes(buffer.view) for buffer in buffers)


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
@pytest.mark.parametrize("cuts", [[], [1], [5, 7, 11]], ids=str)
def test_what_ranks_of_one_tp_size_stored_ranks_of_another_read(writers, readers, cuts):
    storage = Dict()
    for layer, own in ranks(storage, writers):
        assert layer.batch_set_from(["x", "y"], [page(own, cuts), page(own[::-1], cuts)]) == [Status.OK] * 2
    assert sorted(storage.pages) == [f"{key}.heads{index}of4" for key in "xy" for index in range(4)]
    for layer, own in ranks(storage, readers):
        target = page(bytes(len(own)), cuts)
        assert layer.batch_get_into(["x"], [target]) == [Status.OK]
        assert content(target) == own
        assert layer.get("x") == own
        assert layer.batch_exists(["x", "z", "y"]) == [True, False, True]


def test_one_page_at_a_time_is_the_same(tmp_path):
    batch, single = Dict(), Dict()
    for (layer, own), (other, _) in zip(ranks(batch, 2), ranks(single, 2), strict=True):
        layer.batch_set_from(["x"], [page(own, [3])])
        other.set("x", memoryview(own))
        assert other.exists("x")
        assert not other.exists("y")
    assert batch.pages == single.pages


@pytest.mark.parametrize("index", range(4))
def test_a_page_without_one_of_its_slices_is_not_there(index):
    storage = Dict()
    (layer, own), *_ = ranks(storage, 1)
    layer.batch_set_from(["x", "y"], [page(own, []), page(own, [])])
    del storage.pages[f"x.heads{index}of4"]
    pages = [page(bytes(len(own)), []) for _ in "xy"]
    assert layer.batch_exists(["x", "y"]) == [False, True]
    assert layer.batch_get_into(["x", "y"], pages) == [Status.MISSING, Status.OK]
    assert layer.get("x") is None
    storage.pages[f"x.heads{index}of4"] = b"short"
    assert layer.batch_get_into(["x", "y"], pages) == [Status.CORRUPT, Status.OK]


def test_deleting_a_page_deletes_all_its_slices():
    storage = Dict()
    (layer, own), *_ = ranks(storage, 1)
    layer.batch_set_from(["x", "y"], [page(own, []), page(own, [])])
    layer.delete(["x"])
    assert sorted(storage.pages) == [f"y.heads{index}of4" for index in range(4)]


def test_a_page_that_is_no_whole_number_of_slices_is_refused():
    layer = HeadSlicesLayer(Dict(), range(4), 4)
    with pytest.raises(BufferMismatchError, match="30 bytes is not keys and values of 4 slices"):
        layer.batch_set_from(["x"], [page(bytes(30), [])])


def test_no_call_below_has_more_objects_than_a_batch(monkeypatch):
    storage, sizes = Dict(), []
    (layer, own), *_ = ranks(storage, 1)
    write = storage.batch_set_from
    monkeypatch.setattr(
        storage, "batch_set_from", lambda keys, pages: sizes.append(len(keys)) or write(keys, pages)
    )
    names = [str(number) for number in range(128)]
    assert layer.batch_set_from(names, [page(own, [])] * 128) == [Status.OK] * 128
    assert sizes == [128] * 4
