"""Copies between L1 and L2: every io_backend moves the same bytes, whatever the layout."""

import ctypes
import sys
from importlib.util import find_spec

import pytest
import torch

from hicache_storage import SettingsError
from hicache_storage.engine import LAYOUTS, KVShape, direct, kernel
from hicache_storage.engine.layouts import LAYER_FIRST, PAGE_FIRST_DIRECT
from hicache_storage.engine.pools import DevicePool, HostPool
from hicache_storage.engine.transfer import IO_BACKENDS, open_transfer

CPU = torch.device("cpu")
PAGE = 4
SHAPES = ["mha:3x2x8:bf16", "mla:3x64:bf16", "mha:2x3x3:fp8_e4m3", "mla:2x9:fp16", "mha:5x1x128:fp32"]
SHAPES_AND_LAYOUTS = [
    pytest.param(KVShape.parse(shape), layout, id=f"{shape}-{layout.name}")
    for shape in SHAPES
    for layout in LAYOUTS.values()
    if shape[:3] in layout.attentions
]
WIDE = [case for case in SHAPES_AND_LAYOUTS if case.values[1] in (LAYER_FIRST, PAGE_FIRST_DIRECT)]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def open_pools(shape, layout, device=CPU):
    l1, l2 = DevicePool(shape, PAGE, 6, device), HostPool(shape, PAGE, 9, layout, device)
    return l1, l2


def number(pool, start=0):
    """Give every word of the pool a value of its own; a copy of the pages."""
    words = torch.arange(pool.pages.numel(), device=pool.pages.device) + start
    pool.pages.copy_(words.view(pool.pages.shape))
    return pool.pages.cpu().clone()


def assert_moved(target, before, target_slots, source, source_slots, layers=slice(None)):
    expected = before.clone()
    expected[target_slots, :, layers] = source[source_slots, :, layers]
    assert torch.equal(target.pages.cpu(), expected)


def memmoved(source, source_slots, target, target_slots, by_layer):
    """As ``direct.copy_2d``, enqueuing what the fixture ``memcpy_2d`` does at once."""
    layers = source.sizes["layer"]
    for step in [range(i, i + 1) for i in range(layers)] if by_layer else [range(layers)]:
        direct._enqueue(direct.pieces(source, source_slots, target, target_slots, step), 0)
        yield step


@pytest.fixture
def memcpy_2d(monkeypatch):
    """memmove in the place of cudaMemcpy2DAsync; the list of the rows that each call was given."""
    calls = []

    def copy(target, target_pitch, source, source_pitch, width, rows, _kind, _stream):
        assert width <= min(target_pitch, source_pitch)
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width)
        calls.append(rows)
        return 0

    monkeypatch.setattr(direct, "load_memcpy_2d", lambda: copy)
    return calls


@pytest.fixture
def interpreted(monkeypatch):
    """``kernel.copy_strided`` with its Triton kernel run by Triton's interpreter, on a CPU."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: make test-triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "hicache_storage.engine.triton_copy", raising=False)
    yield kernel.copy_strided
    sys.modules.pop("hicache_storage.engine.triton_copy", None)


def check_both_ways(copy, shape, layout, by_layer):
    for s, t in [([0, 1, 2, 5, 4], [7, 8, 0, 1, 2]), ([3], [3]), ([0, 1, 2, 3], [2, 3, 4, 5])]:
        l1, l2 = open_pools(shape, layout)
        for source, target in ((l1, l2), (l2, l1)):
            from_slots, to_slots = (s, t) if source is l1 else (t, s)
            pages, before = number(source), number(target, start=9)
            done = []
            for layers in copy(source, from_slots, target, to_slots, by_layer):
                done += layers
                assert_moved(target, before, to_slots, pages, from_slots, slice(0, layers.stop))
            assert done == list(range(shape.layers))


@pytest.mark.parametrize("by_layer", [False, True], ids=["at_once", "by_layer"])
@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
@pytest.mark.parametrize("copy", [direct.copy_runs, kernel.copy_indexed], ids=["direct", "kernel"])
def test_copies_move_the_layers_and_pages_they_name_and_nothing_else(copy, shape, layout, by_layer):
    check_both_ways(copy, shape, layout, by_layer)


@pytest.mark.parametrize("by_layer", [False, True], ids=["at_once", "by_layer"])
@pytest.mark.parametrize(("shape", "layout"), WIDE)
@pytest.mark.usefixtures("memcpy_2d")
def test_the_pieces_of_two_dimensional_copies_are_the_same_bytes(shape, layout, by_layer):
    check_both_ways(memmoved, shape, layout, by_layer)


@pytest.mark.parametrize("by_layer", [False, True], ids=["at_once", "by_layer"])
@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
def test_the_gpus_kernel_moves_the_same_bytes_in_the_interpreter(interpreted, shape, layout, by_layer):
    check_both_ways(interpreted, shape, layout, by_layer)


@pytest.mark.parametrize("capability", [80, 90])
def test_the_gpus_kernel_compiles_and_moves_sixteen_bytes_a_thread(monkeypatch, tmp_path, capability):
    triton = pytest.importorskip("triton", reason="triton is not installed: make test-triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    copy = kernel.load_kernel()
    names = copy.copy_rows.arg_names
    signature = dict.fromkeys(names, "i32")
    signature |= dict.fromkeys(("source", "target", "source_slots", "target_slots"), "*i64")
    signature |= dict.fromkeys(("LAYERS", "ROWS", "WORDS"), "constexpr")
    rows, words = copy.blocks(64 * 8, 32, 8)  # Llama-3.1-8B, 64 tokens: all strides are multiples of 16
    multiples = ("source", "target", "page", "kv", "layer", "token", "head", "words")
    divisible = [i for i, name in enumerate(names) if name.split("_")[-1] in multiples]
    compiled = triton.compile(
        triton.compiler.ASTSource(
            copy.copy_rows,
            signature,
            constexprs={"LAYERS": 32, "ROWS": rows, "WORDS": words},
            attrs={(i,): [["tt.divisibility", 16]] for i in divisible if "first" not in names[i]},
        ),
        target=triton.backends.compiler.GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": False},
    )
    assert compiled.asm["ptx"].count("ld.global.v2.b64") >= 4  # in flight at once
    assert compiled.asm["ptx"].count("st.global.v2.b64") >= 4


def test_rows_too_far_apart_for_one_copy_are_copied_one_by_one(memcpy_2d, monkeypatch):
    monkeypatch.setattr(direct, "_MAX_PITCH", 128)
    check_both_ways(memmoved, KVShape.mha(3, 2, 8), PAGE_FIRST_DIRECT, by_layer=False)
    assert set(memcpy_2d) == {1}


def test_a_copy_that_cuda_refuses_is_an_error(monkeypatch):
    monkeypatch.setattr(direct, "load_memcpy_2d", lambda: lambda *_: 1)
    with pytest.raises(RuntimeError, match=r"cudaMemcpy2DAsync: error 1 for Copy2D\(target="):
        check_both_ways(memmoved, KVShape.mha(3, 2, 8), PAGE_FIRST_DIRECT, by_layer=False)


def test_a_page_of_page_first_direct_is_one_copy_for_keys_and_one_for_values():
    l1, l2 = open_pools(KVShape.mha(5, 2, 8), PAGE_FIRST_DIRECT)
    pieces = list(direct.pieces(l2, [7, 3], l1, [0, 4], range(5)))
    assert len(pieces) == 2 * 2
    assert {(piece.rows, piece.width) for piece in pieces} == {(5, PAGE * 2 * 8 * 2)}


def test_one_layer_of_neighbouring_pages_is_one_copy_for_keys_and_one_for_values():
    l1, l2 = open_pools(KVShape.mha(5, 2, 8), PAGE_FIRST_DIRECT)
    pieces = list(direct.pieces(l2, [3, 4, 5, 6], l1, [0, 1, 2, 3], range(2, 3)))
    assert [piece.rows for piece in pieces] == [4, 4]


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_nothing_to_move_is_moved_at_once(io_backend):
    transfer = open_transfer(io_backend, *open_pools(KVShape.mha(2, 1, 8), LAYER_FIRST))
    transfer.load([], []).wait()
    assert transfer.store([], []) == 0


def test_a_kernel_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "hicache_storage.engine.triton_copy", None)
    pools = open_pools(KVShape.mha(2, 1, 8), LAYER_FIRST)
    with pytest.raises(SettingsError, match="needs Triton: pip install triton"):
        list(kernel.copy_strided(pools[0], [0], pools[1], [0], True))


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA runtime")
def test_direct_without_a_cuda_runtime_says_which_one_is_missing():
    with pytest.raises(SettingsError, match=r"io_backend direct on cuda needs libcudart\.so\.None"):
        direct.load_memcpy_2d()


@pytest.mark.parametrize("io_backend", IO_BACKENDS)
@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
def test_pages_that_went_to_l2_and_came_back_are_the_same_pages(device, shape, layout, io_backend):
    l1, l2 = open_pools(shape, layout, torch.device(device))
    transfer = open_transfer(io_backend, l1, l2)
    before, host = number(l1), number(l2, start=9)
    transfer.store([0, 1, 2, 5, 4], [7, 8, 0, 1, 2])
    assert_moved(l2, host, [7, 8, 0, 1, 2], before, [0, 1, 2, 5, 4])
    host, device_before = l2.pages.clone(), number(l1, start=5)
    loading = transfer.load([7, 0, 1], [3, 4, 5])
    for layer in range(shape.layers):
        loading.wait_layer(layer)
        assert torch.equal(l1.pages[3:, :, layer].cpu(), host[[7, 0, 1], :, layer])
    assert loading.wait() >= 0
    assert_moved(l1, device_before, [3, 4, 5], host, [7, 0, 1])
    transfer.close()
    l2.close()
