"""The directory of pages as streams see it: how files are opened, and how many at a time."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache_storage import Buffer, Page
from hicache_storage.directory.direct import is_aligned
from hicache_storage.directory.oserrors import NO_DESCRIPTORS
from hicache_storage.directory.pages import PageDirectory
from hicache_storage_nixl.transfers import CrowdedError, Transfers

T = TypeVar("T")

MAX_FILES = 128
"""Files open in one stream; SGLang's batches have as many pages."""


@dataclass(frozen=True, slots=True)
class Access:
    """Thread-safe, like all that is in it."""

    directory: PageDirectory
    transfers: Transfers
    direct: bool
    """Whether files are opened with O_DIRECT where memory and size allow it."""

    def at_a_time(self) -> int:
        """Files that one stream may have open: a quarter of what the process has left, for others' sake."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        left = MAX_FILES * 4
        if soft != resource.RLIM_INFINITY:
            left = min(left, soft - len(os.listdir("/proc/self/fd")))
        return max(1, left // 4)

    def flags(self, memory: Sequence[Buffer]) -> int:
        """What to open a file with whose bytes are to lie in this memory, beside the usual."""
        return os.O_DIRECT if self.direct and is_aligned(memory) else 0

    def width(self, pages: Sequence[Page]) -> int:
        """How many of these pages may be in flight in one stream, if they are moved as they lie."""
        buffers = max(map(len, pages), default=1)
        return max(1, min(self.at_a_time(), self.transfers.max_descriptors // max(1, buffers)))

    def step(self, nbytes: int, alone: bool, take: Callable[[], T]) -> T:
        """Open or create a file, once more if what hindered it could be mended.

        Raises CrowdedError where descriptors are missing and it is not ``alone``, StorageError.
        """
        try:
            return take()
        except OSError as error:
            if error.errno in NO_DESCRIPTORS and not alone:
                raise CrowdedError from error
            return self.directory.writer.attempt(nbytes, take)
