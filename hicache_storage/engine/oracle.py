"""What every byte of KV must be: "compute" without a model, and the check of whatever comes back.

The content of a page is a function of its hash (that is, of all tokens up to its end) and of the
position inside the page: keys or values, layer, token, head, dimension. So a page found in any
tier is checked without keeping a copy of it, and a page of other tokens, another layer or a
neighbouring token never passes.

The word at position ``p`` of a page is ``(pattern[p] ^ a) * b`` modulo 2**64, ``a`` and the odd
``b`` being the first 16 bytes of the page hash: two cheap passes over memory, the same on CPU and
CUDA. ``pattern`` is addressed by (kv, layer, token, head), so a rank that holds some of the heads
holds a slice of it. A side pool of a hybrid model has a pattern of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import torch

from hicache_storage.engine.compute import Work
from hicache_storage.engine.runs import runs
from hicache_storage.engine.shard import Shard

_CHUNK_NBYTES = {"cpu": 1 << 18, "cuda": 1 << 26}
"""Pages are worked on in chunks: on a CPU small enough to stay in a core's cache, and for torch not
to start its thread team, which waits spinning for cores that the storage's threads use."""


class Oracle:
    """Fills and checks the pages of a shard; see ``PagePool.pages`` for the axes. A Compute.

    ``salt`` names a side pool.
    """

    def __init__(self, shard: Shard, page_size: int, device: torch.device, salt: str = "") -> None:
        shape, model = shard.shape, shard.model
        words = -(-shape.head_nbytes // 8)
        axes = [range(shape.kv), shard.layers, range(page_size), shard.heads, range(words)]
        sizes = [shape.kv, model.layers, page_size, model.heads, words]
        position = torch.zeros((), dtype=torch.int64, device=device)
        for axis, size in zip(axes, sizes, strict=True):
            along = torch.arange(axis.start, axis.stop, dtype=torch.int64, device=device)
            position = position.unsqueeze(-1) * size + along
        self._pattern = _mix(position + (zlib.crc32(salt.encode()) << 31)).unsqueeze(0)
        self._head_nbytes = shape.head_nbytes
        self._chunk_pages = max(1, _CHUNK_NBYTES[device.type] // shape.page_nbytes(page_size))

    def compute(self, pages: torch.Tensor, work: Work) -> None:
        """Write the content of the request's pages that are not cached."""
        self.fill(pages, work.slots[work.cached :], work.hashes[work.cached :])

    def check(self, pages: torch.Tensor, work: Work) -> int:
        """How many bytes of the request's pages are wrong."""
        return self.wrong_bytes(pages, work.slots, work.hashes)

    def fill(self, pages: torch.Tensor, slots: Sequence[int], hashes: Sequence[str]) -> None:
        """Write the content of page ``hashes[i]`` into slot ``slots[i]``."""
        for part, expected in self._chunks(pages, slots, hashes):
            part.copy_(expected)

    def wrong_bytes(self, pages: torch.Tensor, slots: Sequence[int], hashes: Sequence[str]) -> int:
        """How many bytes in ``slots`` are not what the pages ``hashes`` must hold; 0 is right."""
        wrong = 0
        for part, expected in self._chunks(pages, slots, hashes):
            if not torch.equal(part, expected):
                wrong += int((part.contiguous().view(torch.uint8) != expected.view(torch.uint8)).sum())
        return wrong

    def _chunks(
        self, pages: torch.Tensor, slots: Sequence[int], hashes: Sequence[str]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of some neighbouring pages in the pool and what they must hold."""
        if not slots:
            return
        a, b = _seeds(hashes, pages.device)
        for index, slot, count in runs(range(len(slots)), slots, self._chunk_pages):
            expected = torch.bitwise_xor(self._pattern, a[index : index + count]).mul_(
                b[index : index + count]
            )
            if pages.dtype == torch.uint8:
                expected = expected.view(torch.uint8)[..., : self._head_nbytes].contiguous()
            yield pages.narrow(0, slot, count), expected


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring positions to unlike words: the finalizer of splitmix64, with signed shifts."""
    x = (x + 1) * -0x61C8864680B583EB
    x = (x ^ (x >> 30)) * -0x40A7B892E31B1A47
    x = (x ^ (x >> 27)) * -0x6B2FB644ECCEEE15
    return x ^ (x >> 31)


def _seeds(hashes: Sequence[str], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    data = bytearray.fromhex("".join([page_hash[:32] for page_hash in hashes]))
    seeds = torch.frombuffer(data, dtype=torch.int64).to(device).view(-1, 2, 1, 1, 1, 1, 1)
    return seeds[:, 0], seeds[:, 1] | 1
