"""Late writes: the call has returned, the transfer has not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from hicache_conformance.mutants import mutant
from hicache_conformance.native import NativeStorage
from hicache_storage import Page, Status, time_left

LATE_SECONDS = 0.03


def _later(page: Page, value: bytes) -> None:
    """Put ``value`` into the page a moment after the call has returned."""

    def write() -> None:
        time.sleep(LATE_SECONDS)
        target = page[-1].view[: len(value)]
        target[:] = value[: len(target)]

    threading.Thread(target=write, daemon=True).start()


@mutant("zero-copy.late_write_after_a_hit")
class LateWriteAfterHit(NativeStorage):
    """The last page of a batch is written once more when a slow replica answers (Mooncake#850)."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_get_into(keys, pages)
        if statuses and statuses[-1]:
            _later(pages[-1], self.store[keys[-1]])
        return statuses


@mutant("zero-copy.late_write_after_a_miss")
class LateWriteAfterMiss(NativeStorage):
    """A page that was missed is cleared later, in the background."""

    def read_page(self, key: str, page: Page) -> Status:
        status = super().read_page(key, page)
        if status is Status.MISSING:
            _later(page, b"\0" * 64)
        return status


@mutant("zero-copy.late_write_after_an_error")
class LateWriteAfterError(NativeStorage):
    """A page whose object does not fit is reported, and read all the same."""

    def read_page(self, key: str, page: Page) -> Status:
        status = super().read_page(key, page)
        if status is Status.CORRUPT:
            _later(page, self.store[key])
        return status


class _Slow(NativeStorage):
    """Takes a millisecond a page."""

    def read_page(self, key: str, page: Page) -> Status:
        time.sleep(0.001)
        return super().read_page(key, page)


@mutant("zero-copy.late_write_after_a_deadline", "zero-copy.late_write_through_the_layers")
class GoesOnAfterTheDeadline(_Slow):
    """At the deadline the call returns, and the transfers that were under way land later."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_get_into(keys, pages)
        late = [i for i, status in enumerate(statuses) if status is Status.TIMED_OUT]
        if late:
            _later(pages[late[0]], self.store.get(keys[late[0]], b""))
        return statuses


@mutant("zero-copy.late_write_after_a_deadline")
class IgnoresItsDeadline(NativeStorage):
    """Says that it is bounded, and works until it is done."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        if time_left() is not None:
            time.sleep(2.5)
        return [self.read_page(key, page) for key, page in zip(keys, pages, strict=True)]


@mutant("zero-copy.late_read_after_a_deadline")
class StoresAfterTheDeadline(NativeStorage):
    """A write that its deadline cut off goes on, from memory that is another page's by then."""

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_set_from(keys, pages)
        late = [i for i, status in enumerate(statuses) if status is Status.TIMED_OUT]

        def go_on() -> None:
            time.sleep(0.005)
            for i in late:
                self.write_page(keys[i], pages[i])

        threading.Thread(target=go_on, daemon=True).start()
        return statuses
