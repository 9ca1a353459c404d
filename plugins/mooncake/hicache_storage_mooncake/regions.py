"""Which memory pages may point into.

Over TCP and inside one process Mooncake moves unregistered memory without a word; over RDMA it
fails. Checking here makes the cheap machine behave like the dear one.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence

from hicache_storage import Buffer, BufferMismatchError, Page


class Regions:
    """Registered buffers by address. Lookups take no lock: the lists are replaced, never changed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sorted: tuple[list[int], list[int]] = ([], [])

    def add(self, buffer: Buffer) -> None:
        """Pages may lie in ``buffer`` from now on; several registrations of it count."""
        with self._lock:
            starts, ends = self._sorted
            at = bisect_right(starts, buffer.address)
            self._sorted = (
                [*starts[:at], buffer.address, *starts[at:]],
                [*ends[:at], buffer.end, *ends[at:]],
            )

    def remove(self, buffer: Buffer) -> bool:
        """Take back one ``add``; whether there was one."""
        with self._lock:
            spans = list(zip(*self._sorted, strict=True))
            if (buffer.address, buffer.end) not in spans:
                return False
            spans.remove((buffer.address, buffer.end))
            self._sorted = ([start for start, _ in spans], [end for _, end in spans])
            return True

    def drain(self) -> list[Buffer]:
        """All of them, which are registered no more."""
        with self._lock:
            spans, self._sorted = self._sorted, ([], [])
        return [Buffer(start, end - start) for start, end in zip(*spans, strict=True)]

    def check(self, pages: Sequence[Page]) -> None:
        """Raise BufferMismatchError unless every buffer of every page lies in one region."""
        starts, ends = self._sorted
        start = end = 0
        for page in pages:
            for buffer in page:
                if start <= buffer.address and buffer.address + buffer.nbytes <= end:
                    continue
                at = bisect_right(starts, buffer.address) - 1
                if buffer.nbytes and (at < 0 or buffer.end > ends[at]):
                    raise BufferMismatchError(
                        f"{buffer.nbytes} bytes at {buffer.address:#x} lie in no registered buffer"
                    )
                if buffer.nbytes:
                    start, end = starts[at], ends[at]
