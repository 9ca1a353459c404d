"""The Triton kernel of ``io_backend`` kernel. Import it only where it is to run.

One program moves a block of (token, head) rows of one page's keys or values through some layers.
All that a layout is reaches it as strides, in words.
"""

from __future__ import annotations

import triton
import triton.language as tl

_TILE_NBYTES = 1 << 14
"""Of one program: enough bytes in flight to hide the way over PCIe with a few programs a
multiprocessor. To be tuned on a GPU."""


def blocks(rows: int, words: int, word_nbytes: int) -> tuple[int, int]:
    """Rows and words of a tile, powers of two; wide rows are never cut."""
    width = triton.next_power_of_2(words)
    height = max(1, _TILE_NBYTES // (width * word_nbytes))
    return min(height, triton.next_power_of_2(rows)), width


@triton.jit(do_not_specialize=["first_layer"])
def copy_rows(
    source,
    target,
    source_slots,
    target_slots,
    source_page,
    source_kv,
    source_layer,
    source_token,
    source_head,
    target_page,
    target_kv,
    target_layer,
    target_token,
    target_head,
    first_layer,
    rows,
    heads,
    words,
    LAYERS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Copy rows [program 1] of page [program 0], keys or values [program 2], layer after layer."""
    page = tl.program_id(0)
    kv = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    inside = (row < rows)[:, None] & (word < words)[None, :]
    token = (row // heads).to(tl.int64)
    head = (row % heads).to(tl.int64)
    read = source + tl.load(source_slots + page) * source_page + kv * source_kv
    read = read + (token * source_token + head * source_head)[:, None] + word[None, :]
    write = target + tl.load(target_slots + page) * target_page + kv * target_kv
    write = write + (token * target_token + head * target_head)[:, None] + word[None, :]
    for layer in range(LAYERS):
        at = tl.cast(first_layer + layer, tl.int64)
        tl.store(write + at * target_layer, tl.load(read + at * source_layer, mask=inside), mask=inside)
