"""A page of the engine as objects in L3, which only count together as far as they must.

Most pages are one object, and a hybrid model has objects of other pools beside it. Each is a *part* of
the page: KV is part 0, each side pool is one more. (Pages with split heads are several objects too, which
always come and go together: ``layers.head_slices`` makes one of them.) Sets of parts are bit masks.

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

    storage: HiCacheStorage
    suffix: str
    """What follows the page hash in the object's name."""
    page: Callable[[int], Page]
    """The memory, in L2, of the page in a slot."""
    is_written: bool = True
    """Whether this rank writes it."""

    def names(self, hashes: Sequence[str]) -> list[str]:
        """The names of the objects of these pages."""
        return [page_hash + self.suffix for page_hash in hashes]


class PageObjects:
    """Pages by hash and L2 slot. One thread for each of the three calls."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.written: Parts = sum(1 << index for index, part in enumerate(parts) if part.is_written)
        self._parts = list(enumerate(parts))
        self._errors = {"exists": 0, "get": 0, "set": 0}  # one writer each

    @property
    def errors(self) -> int:
        """Calls of a storage that raised."""
        return sum(self._errors.values())

    def exists(self, hashes: Sequence[str]) -> list[Parts]:
        """The parts of each page that are there."""

        def ask(part: Part, numbers: Sequence[int]) -> list[bool]:
            names = part.names([hashes[number] for number in numbers])
            return [bool(there) for there in self._call("exists", part.storage.batch_exists, names)]

        return self._each([(1 << len(self._parts)) - 1] * len(hashes), ask)

    def get(self, hashes: Sequence[str], wanted: Sequence[Parts], slots: Sequence[int]) -> list[Parts]:
        """Read these parts of each page into its slot; the parts that have come."""

        def read(part: Part, numbers: Sequence[int]) -> list[bool]:
            names = part.names([hashes[number] for number in numbers])
            pages = [part.page(slots[number]) for number in numbers]
            statuses = self._call("get", part.storage.batch_get_into, names, pages)
            return [status is Status.OK for status in statuses]

        return self._each(wanted, read)

    def set(self, hashes: Sequence[str], wanted: Sequence[Parts], slots: Sequence[int]) -> list[Parts]:
        """Store these parts of each page from its slot; the parts that are stored."""

        def write(part: Part, numbers: Sequence[int]) -> list[bool]:
            names = part.names([hashes[number] for number in numbers])
            pages = [part.page(slots[number]) for number in numbers]
            statuses = self._call("set", part.storage.batch_set_from, names, pages)
            return [status is Status.OK for status in statuses]

        return self._each(wanted, write)

    def _each(
        self, wanted: Sequence[Parts], call: Callable[[Part, Sequence[int]], list[bool]]
    ) -> list[Parts]:
        """Do ``call`` with the numbers of the pages that each part is wanted of; the parts that are good."""
        good = list(wanted)
        for index, part in self._parts:
            numbers = [number for number, parts in enumerate(wanted) if parts >> index & 1]
            for batch in batches(len(numbers)):
                answers = call(part, numbers[batch])
                for position, number in enumerate(numbers[batch]):
                    if position >= len(answers) or not answers[position]:
                        good[number] &= ~(1 << index)
        return good

    def _call(self, name: str, method: Callable[..., list[T]], *arguments: object) -> list[T]:
        """The storage's answer, or an empty one when it raises or is no list."""
        try:
            answer = method(*arguments)
        except Exception as error:
            self._errors[name] += 1
            logger.warning("storage failed in %s: %s: %s", name, type(error).__name__, error)
            return []
        return answer if isinstance(answer, list) else []
