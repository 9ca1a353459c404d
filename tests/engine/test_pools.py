"""Pools and layouts: where the bytes of a page are."""

import mmap
from itertools import pairwise

import pytest
import torch

from hicache_storage import SettingsError
from hicache_storage.buffers import gather
from hicache_storage.engine import LAYOUTS, KVShape
from hicache_storage.engine.layouts import LAYER_FIRST, PAGE_FIRST, PAGE_FIRST_DIRECT, PAGE_HEAD, find_layout
from hicache_storage.engine.pools import DevicePool, HostPool, pool_slots
from hicache_storage.sglang.identity import AXES

CPU = torch.device("cpu")
SHAPES = ["mha:3x2x8:bf16", "mla:3x64:bf16", "mha:2x3x3:fp8_e4m3", "mla:2x9:fp16"]
SHAPES_AND_LAYOUTS = [
    pytest.param(shape, layout, id=f"{shape}-{layout.name}")
    for shape in SHAPES
    for layout in LAYOUTS.values()
    if shape[:3] in layout.attentions
]


def numbered(pool):
    """The pool's pages, every byte of which says something about its place."""
    pages = pool.pages
    pages.copy_(torch.arange(pages.numel()).view(pages.shape))
    return pages


def stored(pool, slot):
    return bytes(gather(pool.page(slot)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (LAYER_FIRST, "kv layer token head dim"),
        (PAGE_FIRST_DIRECT, "kv layer token head dim"),
        (PAGE_FIRST, "kv token layer head dim"),
        (PAGE_HEAD, "kv head token layer dim"),
    ],
)
def test_the_stored_bytes_of_a_page_are_its_axes_in_the_order_of_the_layout(shape, layout, axes):
    pool = HostPool(KVShape.parse(shape), 4, 5, layout, CPU)
    pages = numbered(pool)
    names = ["kv", "layer", "token", "head", "dim"]
    order = [names.index(axis) for axis in axes.split()]
    for slot in range(5):
        expected = pages[slot].permute(order).contiguous().view(torch.uint8)
        assert stored(pool, slot) == bytes(expected.flatten().tolist())


@pytest.mark.parametrize(("shape", "kv"), [("mha:3x2x8:bf16", 2), ("mla:3x64:bf16", 1)])
def test_a_page_has_as_many_pieces_as_sglang_gives_it(shape, kv):
    shape = KVShape.parse(shape)
    pieces = {name: len(HostPool(shape, 4, 5, layout, CPU).page(0)) for name, layout in LAYOUTS.items()}
    assert pieces == {"layer_first": kv * 3, "page_first": kv, "page_first_direct": kv, "page_head": kv}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_the_stored_order_of_axes_is_what_the_sglang_adapter_reads_off_the_same_layout(layout):
    assert AXES["mha", layout.name] == layout.object_layout
    if "mla" in layout.attentions:  # which has neither a kv nor a head axis there
        axes = [axis for axis in layout.object_layout.split(",") if axis not in ("kv", "head")]
        assert AXES["mla", layout.name] == ",".join(axes)
    else:
        assert ("mla", layout.name) not in AXES


@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
def test_the_pages_of_a_pool_are_its_allocation_once_over(shape, layout):
    pool = HostPool(KVShape.parse(shape), 4, 5, layout, CPU)
    pieces = sorted((b.address, b.end) for slot in range(5) for b in pool.page(slot))
    assert pieces[0][0] == pool.buffer.address
    assert pieces[-1][1] == pool.buffer.end
    assert all(one[1] == next_one[0] for one, next_one in pairwise(pieces))
    assert pool.buffer.address % mmap.PAGESIZE == 0
    assert "pageable" in pool.memory_kind


def test_slots_run_out_and_come_back():
    pool = DevicePool(KVShape.parse("mla:1x8:bf16"), 4, 3, CPU)
    slots = {pool.alloc() for _ in range(3)}
    assert slots == {0, 1, 2}
    assert pool.alloc() is None
    pool.free([1])
    assert pool.free_slots == 1
    assert pool.alloc() == 1


def test_memory_that_is_not_there_is_a_clear_error():
    with pytest.raises(MemoryError, match=r"L2 of .* does not fit: .* are left .*; lower hicache_size"):
        HostPool(KVShape.parse("mla:64x4096:fp32"), 4096, 1 << 16, LAYER_FIRST, CPU)


def test_the_size_of_l2_is_a_ratio_or_gigabytes():
    assert pool_slots(64, 1 << 20, 64 * 10 + 63, 2.5, None) == (10, 25)
    assert pool_slots(64, 1_000_000, 640, 2.0, 0.05) == (10, 50)
    assert pool_slots(64, 1_000_000, 640, 3.0, 0) == (10, 30)  # SGLang's default: the ratio decides


@pytest.mark.parametrize(
    ("l1_tokens", "ratio", "size"),
    [(63, 2, None), (640, 1, None), (640, float("nan"), None), (640, 2, 0.001), (640, 2, -1)],
)
def test_pools_of_impossible_sizes_are_refused(l1_tokens, ratio, size):
    with pytest.raises(SettingsError):
        pool_slots(64, 1_000_000, l1_tokens, ratio, size)


def test_an_unknown_layout_names_the_choices():
    with pytest.raises(SettingsError, match="none of: layer_first, page_first, page_first_direct"):
        find_layout("page_last")
