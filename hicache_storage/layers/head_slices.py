"""Stores a page as one object for each slice of its heads, so that ranks of other TP sizes find theirs.

Ranks of TP2 and TP4 hold different heads, so their pages differ. With a common multiple of both
sizes (SGLang's ``tp_lcm_size``) a page is cut into ``tp_lcm_size / tp_size`` slices of heads, each stored
under a name that says which slice it is and not whose: slice i of tp_lcm_size has the same bytes on
whatever rank it is. A page is there when all its slices are.

That takes a layout in which keys and then values of a page lie head by head: SGLang's ``page_head``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_storage.buffers import Buffer, Page, page_nbytes
from hicache_storage.errors import BufferMismatchError
from hicache_storage.layers.layer import Layer
from hicache_storage.storage import HiCacheStorage, ReadableBuffer, Status, batches, check_batch

T = TypeVar("T")


class HeadSlicesLayer(Layer):
    """Pages whose bytes are keys and then values, each by head, as ``slices`` of ``count`` below.

    Open ``inner`` with a namespace that says nothing of the rank, and the heads of one slice. Raises
    BufferMismatchError for a page that cannot be cut into so many slices.
    """

    def __init__(self, inner: HiCacheStorage, slices: range, count: int) -> None:
        super().__init__(inner)
        self._suffixes = [f".heads{index}of{count}" for index in slices]

    def get(self, key: str) -> ReadableBuffer | None:
        found = [self.inner.get(name) for name in self._names([key])]
        slices = [memoryview(value).cast("B") for value in found if value is not None]
        if len(slices) < len(found):
            return None
        halves = [half for keys in (True, False) for half in (_half(value, keys=keys) for value in slices)]
        return b"".join(halves)

    def exists(self, key: str) -> bool:
        return all(self.inner.exists(name) for name in self._names([key]))

    def set(self, key: str, value: memoryview) -> None:
        value = value.cast("B")
        half, size = value.nbytes // 2, self._slice_nbytes(value.nbytes) // 2
        for index, name in enumerate(self._names([key])):
            keys, values = index * size, half + index * size
            self.inner.set(
                name, memoryview(b"".join([value[keys : keys + size], value[values : values + size]]))
            )

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        names = self._names(keys)
        found = [there for batch in batches(len(names)) for there in self.inner.batch_exists(names[batch])]
        return self._folded(found, all)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._moved(self.inner.batch_get_into, keys, pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._moved(self.inner.batch_set_from, keys, pages)

    def delete(self, keys: Sequence[str]) -> None:
        self.inner.delete(self._names(keys))

    def _moved(
        self,
        move: Callable[[Sequence[str], Sequence[Page]], list[Status]],
        keys: Sequence[str],
        pages: Sequence[Page],
    ) -> list[Status]:
        check_batch(keys, pages)
        names = self._names(keys)
        slices = [part for page in pages for part in self._cut(page)]
        statuses = [status for batch in batches(len(names)) for status in move(names[batch], slices[batch])]
        return self._folded(statuses, _worst)

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [key + suffix for key in keys for suffix in self._suffixes]

    def _cut(self, page: Page) -> list[Page]:
        nbytes = page_nbytes(page)
        half, size = nbytes // 2, self._slice_nbytes(nbytes) // 2
        return [
            [*_part(page, index * size, size), *_part(page, half + index * size, size)]
            for index in range(len(self._suffixes))
        ]

    def _slice_nbytes(self, nbytes: int) -> int:
        size, rest = divmod(nbytes, len(self._suffixes))
        if rest or size % 2:
            raise BufferMismatchError(
                f"a page of {nbytes} bytes is not keys and values of {len(self._suffixes)} slices of heads"
            )
        return size

    def _folded(self, answers: Sequence[T], fold: Callable[[Sequence[T]], T]) -> list[T]:
        step = len(self._suffixes)
        return [fold(answers[start : start + step]) for start in range(0, len(answers), step)]


def _worst(statuses: Sequence[Status]) -> Status:
    """What became of a page: it is there when all slices are."""
    return next((status for status in statuses if status is not Status.OK), Status.OK)


def _part(page: Page, offset: int, nbytes: int) -> list[Buffer]:
    """Some of the page's bytes, as the buffers that they lie in."""
    part = []
    for buffer in page:
        begin, end = max(0, offset), min(buffer.nbytes, offset + nbytes)
        if begin < end:
            part.append(buffer.slice(begin, end - begin))
        offset -= buffer.nbytes
    return part


def _half(value: memoryview, *, keys: bool) -> memoryview:
    middle = value.nbytes // 2
    return value[:middle] if keys else value[middle:]
