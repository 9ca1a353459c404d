"""A page of the engine as objects in L3: one, or several that only count together.

Most pages are one object. A page whose heads are split is one for each slice of heads, and a
hybrid model has objects of other pools beside it. What always comes and goes together is a *part* of
the page: KV is part 0, each side pool is one more. A part is there when all its objects are; one bad
object costs its part and nothing else. Sets of parts are bit masks.

This is also where the engine calls its storage: whatever that raises or answers wrongly is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from hicache_storage.buffers import Page
from hicache_storage.storage import HiCacheStorage, Status, batches

logger = logging.getLogger(__name__)

T = TypeVar("T")

Parts: TypeAlias = int
"""A set of parts: bit i stands for part i."""

KV: Parts = 1
"""Every page has it."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one pool has of a page."""

    suffixes: Sequence[str]
    """What follows the page hash in the name of each object."""
    pages: Callable[[int], Sequence[Page]]
    """The memory of each object, in L2, of the page in a slot."""
    is_written: bool = True
    """Whether this rank writes it."""


class PageObjects:
    """Pages in ``storage``, by hash and L2 slot. One thread for each of the three calls."""

    def __init__(self, storage: HiCacheStorage, parts: Sequence[Part]) -> None:
        self.all: Parts = (1 << len(parts)) - 1
        self.written: Parts = sum(1 << index for index, part in enumerate(parts) if part.is_written)
        self._storage = storage
        self._parts = list(enumerate(parts))
        self._errors = {"exists": 0, "get": 0, "set": 0}  # one writer each

    @property
    def errors(self) -> int:
        """Calls of the storage that raised."""
        return sum(self._errors.values())

    def exists(self, hashes: Sequence[str]) -> list[Parts]:
        """The parts of each page that are there."""
        return self._each("exists", self._storage.batch_exists, bool, hashes, [self.all] * len(hashes), None)

    def get(self, hashes: Sequence[str], wanted: Sequence[Parts], slots: Sequence[int]) -> list[Parts]:
        """Read these parts of each page into its slot; the parts that have come."""
        return self._each("get", self._storage.batch_get_into, _is_ok, hashes, wanted, slots)

    def set(self, hashes: Sequence[str], wanted: Sequence[Parts], slots: Sequence[int]) -> list[Parts]:
        """Store these parts of each page from its slot; the parts that are stored."""
        return self._each("set", self._storage.batch_set_from, _is_ok, hashes, wanted, slots)

    def _each(
        self,
        name: str,
        method: Callable[..., list[T]],
        is_good: Callable[[T], bool],
        hashes: Sequence[str],
        wanted: Sequence[Parts],
        slots: Sequence[int] | None,
    ) -> list[Parts]:
        """Call ``method`` with the objects of all wanted parts, and fold its answers into parts."""
        keys: list[str] = []
        pages: list[Page] = []
        of: list[tuple[int, Parts]] = []
        for number, (page_hash, parts) in enumerate(zip(hashes, wanted, strict=True)):
            for index, part in self._parts:
                if parts >> index & 1:
                    keys += [page_hash + suffix for suffix in part.suffixes]
                    of += [(number, 1 << index)] * len(part.suffixes)
                    if slots is not None:
                        pages += part.pages(slots[number])
        found = list(wanted)
        for batch in batches(len(keys)):
            arguments = [keys[batch]] if slots is None else [keys[batch], pages[batch]]
            good = [is_good(answer) for answer in self._call(name, method, arguments)]
            for index, (number, bit) in enumerate(of[batch]):
                if index >= len(good) or not good[index]:
                    found[number] &= ~bit
        return found

    def _call(self, name: str, method: Callable[..., list[T]], arguments: Sequence[object]) -> list[T]:
        """The storage's answer, or an empty one when it raises or is no list."""
        try:
            answer = method(*arguments)
        except Exception as error:
            self._errors[name] += 1
            logger.warning("storage failed in %s: %s: %s", name, type(error).__name__, error)
            return []
        return answer if isinstance(answer, list) else []


def _is_ok(status: Status) -> bool:
    return status is Status.OK
