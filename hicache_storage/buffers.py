"""Memory that pages live in: an address and a length, and pages as scatter lists of those.

A page of KV cache is one object in L3 but seldom one piece of memory in L2: two buffers (K and V)
for MHA in ``page_first``, one for MLA, ``2 * layers`` in ``layer_first``. Backends gather from and
scatter into these buffers in list order; the object's bytes are their concatenation.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

_CHAR = ctypes.c_char

_GIL_NBYTES = 64 << 10
"""Getting the GIL back from a busy thread takes longer than copying fewer bytes than this."""

_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove.restype = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Buffer:
    """``nbytes`` bytes of memory at ``address``.

    The memory is the caller's. Whoever makes a Buffer from a bare address keeps that memory
    alive for as long as a call uses it; ``Buffer.of`` keeps it alive by itself (``owner``).
    """

    address: int
    nbytes: int
    owner: object = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, memory: Any) -> Buffer:
        """A Buffer over any writable, C-contiguous object (bytearray, mmap, numpy array).

        Raises TypeError or BufferError when the object is read-only or not contiguous.
        """
        view = memoryview(memory).cast("B")
        if view.nbytes == 0:
            return cls(0, 0, memory)
        anchor = (_CHAR * view.nbytes).from_buffer(view)
        return cls(ctypes.addressof(anchor), view.nbytes, anchor)

    @classmethod
    def allocate(cls, nbytes: int) -> Buffer:
        """Fresh, page-aligned memory; from 2 MiB on in huge pages where the system has some.

        Private to the process: shared memory gets no huge pages, and a disk that is handed 4 KiB pages
        one by one may read at half its speed. Raises OSError when there is not enough.
        """
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls.of(memory)

    @property
    def view(self) -> memoryview:
        """The memory itself as a writable view of bytes; nothing is copied."""
        if self.nbytes == 0:
            return memoryview(bytearray())
        return memoryview((_CHAR * self.nbytes).from_address(self.address)).cast("B")

    @property
    def end(self) -> int:
        """The address one past the last byte."""
        return self.address + self.nbytes

    def contains(self, other: Buffer) -> bool:
        """Whether ``other`` lies wholly inside this buffer."""
        return self.address <= other.address and other.end <= self.end

    def slice(self, offset: int, nbytes: int) -> Buffer:
        """A part of this buffer; it keeps the same owner alive.

        Raises ValueError when the part does not lie inside.
        """
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f"bytes {offset}..{offset + nbytes} lie outside a buffer of {self.nbytes}")
        return Buffer(self.address + offset, nbytes, self.owner)


Page: TypeAlias = Sequence[Buffer]
"""One page of one pool on one rank: the buffers whose concatenation is the stored object."""


def page_nbytes(page: Page) -> int:
    """Size of the object that holds this page, in bytes."""
    return sum(buffer.nbytes for buffer in page)


def views(page: Page) -> list[memoryview]:
    """The page's memory, a writable view a buffer, in order."""
    return [buffer.view for buffer in page]


def gather(page: Page) -> memoryview:
    """The page's bytes in one piece: the memory itself for one buffer, else a copy."""
    if len(page) == 1:
        return page[0].view
    return memoryview(b"".join(views(page)))


def copy(source: Page, target: Page) -> None:
    """Copy the bytes of one scatter list to another of the same size, however each is cut.

    Other threads run meanwhile where a piece is large enough for that to pay.
    """
    pieces = iter(target)
    at, room = 0, 0
    for buffer in source:
        address, left = buffer.address, buffer.nbytes
        while left:
            while not room:
                piece = next(pieces)
                at, room = piece.address, piece.nbytes
            count = min(left, room)
            (_memmove if count < _GIL_NBYTES else ctypes.memmove)(at, address, count)
            address, left, at, room = address + count, left - count, at + count, room - count


def scatter(value: Any, page: Page) -> None:
    """Copy ``value``, which has exactly the page's size, into the page's buffers in order."""
    source = memoryview(value).cast("B")
    offset = 0
    for buffer in page:
        buffer.view[:] = source[offset : offset + buffer.nbytes]
        offset += buffer.nbytes
