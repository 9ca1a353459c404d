"""Memory is described, never copied."""

import mmap
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.buffers import Buffer, copy, gather, page_nbytes, scatter


def test_a_view_is_the_memory_itself():
    memory = bytearray(b"0123456789")
    buffer = Buffer.of(memory)
    buffer.view[3:5] = b"xy"
    assert memory == b"012xy56789"
    assert (buffer.nbytes, buffer.end) == (10, buffer.address + 10)


def test_a_slice_keeps_its_memory_alive():
    part = Buffer.of(mmap.mmap(-1, 4096)).slice(100, 8)
    part.view[:] = b"8 bytes!"
    assert bytes(part.view) == b"8 bytes!"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 11), (10, 1), (3, -1)])
def test_a_slice_outside_its_buffer_is_refused(offset, nbytes):
    with pytest.raises(ValueError, match="outside"):
        Buffer.of(bytearray(10)).slice(offset, nbytes)


def test_read_only_memory_is_refused():
    with pytest.raises((TypeError, BufferError)):
        Buffer.of(b"constant")


def test_an_empty_buffer_has_an_empty_view():
    assert bytes(Buffer.of(bytearray()).view) == b""


def test_gather_and_scatter_keep_the_order_of_the_buffers():
    parts = [bytearray(b"abc"), bytearray(b""), bytearray(b"defg")]
    page = [Buffer.of(part) for part in parts]
    assert bytes(gather(page)) == b"abcdefg"
    assert page_nbytes(page) == 7
    scatter(b"7654321", page)
    assert parts == [b"765", b"", b"4321"]


def test_gathering_one_buffer_copies_nothing():
    memory = bytearray(8)
    view = gather([Buffer.of(memory)])
    view[0] = 7
    assert memory[0] == 7


@given(
    sizes=st.lists(st.integers(0, 9), max_size=6),
    others=st.lists(st.integers(0, 9), max_size=6),
    large=st.booleans(),
)
def test_copying_keeps_every_byte_however_the_two_lists_are_cut(sizes, others, large):
    unit = 16 << 10 if large else 1
    rest = sum(sizes) - sum(others)
    sizes, others = [*sizes, max(0, -rest)], [*others, max(0, rest)]
    content = random.Random(1).randbytes(sum(sizes) * unit)
    source, target = ([bytearray(size * unit) for size in cut] for cut in (sizes, others))
    scatter(content, [Buffer.of(piece) for piece in source])
    copy([Buffer.of(piece) for piece in source], [Buffer.of(piece) for piece in target])
    assert b"".join(target) == content


def test_fresh_memory_is_page_aligned_and_ours_alone():
    child = """
import os
from hicache_storage import Buffer
fresh = Buffer.allocate(4096)
assert fresh.address % os.sysconf("SC_PAGE_SIZE") == 0
if os.fork() == 0:
    fresh.view[0] = 1
    os._exit(0)
os.wait()
assert fresh.view[0] == 0
"""
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)
