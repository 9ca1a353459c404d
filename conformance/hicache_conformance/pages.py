"""Page memory that tells: guard bytes around every buffer, and a fingerprint of everything.

The hazards it is made for are writes beside a page (a wrong length, a wrong offset) and writes
after a call has returned (a transfer that was given up but went on).
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Sequence

import xxhash

from hicache_storage import Buffer, Page
from hicache_storage.buffers import scatter

GUARD_NBYTES = 64
GUARD = bytes([0xA5]) * GUARD_NBYTES


class GuardedPages:
    """``count`` pages of one shape in one piece of memory, each buffer between guard bytes.

    ``buffers`` gives the size of each buffer of a page, in bytes. ``misalign`` moves every buffer
    that many bytes off its natural place. ``region`` is what to register.
    """

    def __init__(self, count: int, buffers: Sequence[int], misalign: int = 0) -> None:
        step = [-(-size // 64) * 64 + 2 * GUARD_NBYTES for size in buffers]
        nbytes = max(count * sum(step) + misalign, 1)
        self.region = Buffer.of(mmap.mmap(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE))
        self.region.view[:] = GUARD[:1] * self.region.nbytes
        self.pages: list[Page] = []
        offset = misalign
        for _ in range(count):
            page = []
            for size, taken in zip(buffers, step, strict=True):
                page.append(self.region.slice(offset + GUARD_NBYTES, size))
                offset += taken
            self.pages.append(tuple(page))

    def fill(self, seed: int) -> None:
        """Give every page bytes of its own, the same for the same seed."""
        for number, page in enumerate(self.pages):
            for part, buffer in enumerate(page):
                source = random.Random(f"{seed}/{number}/{part}")
                buffer.view[:] = source.randbytes(buffer.nbytes)

    def write(self, number: int, content: bytes) -> None:
        """Give one page these bytes, its buffers in order."""
        scatter(content, self.pages[number])

    def blank(self) -> None:
        """Overwrite every page, so that what is read next was really written."""
        for page in self.pages:
            for buffer in page:
                buffer.view[:] = b"\xee" * buffer.nbytes

    def content(self, number: int) -> bytes:
        """The bytes of one page, its buffers in order."""
        return b"".join(buffer.view for buffer in self.pages[number])

    def fingerprint(self) -> int:
        """A number that changes when any byte of the whole region does."""
        return int(xxhash.xxh3_64_intdigest(self.region.view))

    def guards_intact(self) -> bool:
        """Whether no byte outside the pages was written."""
        end = 0
        view = self.region.view
        for page in self.pages:
            for buffer in page:
                start = buffer.address - self.region.address
                if view[end:start] != GUARD[:1] * (start - end):
                    return False
                end = start + buffer.nbytes
        return bool(view[end:] == GUARD[:1] * (self.region.nbytes - end))
