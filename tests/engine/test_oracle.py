"""The oracle: what it must catch."""

import hashlib

import pytest
import torch

from hicache_storage.engine import KVShape, Oracle
from hicache_storage.engine.pools import DevicePool
from hicache_storage.engine.shard import Shard

CPU = torch.device("cpu")
SHAPES = ["mha:3x2x8:bf16", "mla:3x64:bf16", "mha:2x3x3:fp8_e4m3", "mla:2x9:fp16"]
HASHES = [hashlib.sha256(bytes([i])).hexdigest() for i in range(6)]


@pytest.fixture(params=SHAPES)
def filled(request):
    shape = KVShape.parse(request.param)
    pool, oracle = DevicePool(shape, 4, 6, CPU), Oracle(Shard(shape), 4, CPU)
    oracle.fill(pool.pages, [5, 0, 1, 2, 4, 3], HASHES)
    return pool, oracle


def test_what_was_filled_is_right(filled):
    pool, oracle = filled
    assert oracle.wrong_bytes(pool.pages, [5, 0, 1, 2, 4, 3], HASHES) == 0
    assert oracle.wrong_bytes(pool.pages, [], []) == 0


def test_content_depends_on_the_hash_alone_and_not_on_the_slot(filled):
    pool, oracle = filled
    oracle.fill(pool.pages, [0], HASHES[:1])
    assert torch.equal(pool.pages[0], pool.pages[5])


def test_every_single_flipped_byte_is_counted(filled):
    pool, oracle = filled
    content = pool.pages[0].contiguous()
    flat = content.view(torch.uint8).flatten()
    for offset in range(0, flat.numel(), 7):
        flat[offset] ^= 0x10
        pool.pages[0] = content
        assert oracle.wrong_bytes(pool.pages, [0], HASHES[1:2]) == 1
        flat[offset] ^= 0x10


@pytest.mark.parametrize("axis", range(5))
def test_neighbours_along_any_axis_cannot_stand_in_for_each_other(filled, axis):
    pool, oracle = filled
    if pool.pages.shape[axis + 1] == 1:
        return
    pool.pages[0] = pool.pages[0].roll(1, dims=axis)
    nbytes = pool.nbytes // 6
    assert oracle.wrong_bytes(pool.pages, [0], HASHES[1:2]) > 0.8 * nbytes


def test_a_page_of_other_tokens_is_wrong_nearly_everywhere(filled):
    pool, oracle = filled
    assert oracle.wrong_bytes(pool.pages, [0], HASHES[:1]) > 0.8 * pool.nbytes // 6


def test_zeros_are_wrong(filled):
    pool, oracle = filled
    pool.pages.zero_()
    assert oracle.wrong_bytes(pool.pages, [0, 1], HASHES[:2]) > 0.8 * pool.nbytes // 3
