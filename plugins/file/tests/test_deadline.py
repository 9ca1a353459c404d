"""Calls end on time on a disk that hangs, and nothing writes late."""

import os
import threading
import time

import pytest

from hicache_storage import DeadlineError, Status
from hicache_storage.deadline import deadline
from hicache_storage_file import pageio

PATIENCE = 0.3


class Hang:
    """Holds up matching system calls until it is released."""

    def __init__(self, monkeypatch, call, matches):
        self.reached, self.release, self.passed = threading.Event(), threading.Event(), threading.Event()
        real = getattr(os, call)

        def hanging(*arguments, **options):
            if not matches(*arguments) or self.release.is_set():
                return real(*arguments, **options)
            self.reached.set()
            assert self.release.wait(30)
            try:
                return real(*arguments, **options)
            finally:
                self.passed.set()

        monkeypatch.setattr(pageio.os, call, hanging)


def on_time(call):
    started = time.monotonic()
    with deadline(PATIENCE):
        result = call()
    assert time.monotonic() - started < PATIENCE + 0.5
    return result


def test_a_hung_read_times_out_and_never_touches_the_page_again(
    opened, memory, namespace, monkeypatch, tools
):
    storage = opened(direct_io="off")
    keys = [namespace.key(f"page-{i}") for i in range(2)]
    stored = [memory.filled(key, 100_000 + i) for i, key in enumerate(keys)]
    assert all(storage.batch_set_from(keys, stored))
    pages = [memory.page(100_000 + i) for i in range(2)]
    for page in pages:
        page[0].view[:] = b"\xaa" * page[0].nbytes

    real = os.preadv

    def cold(fd, views, offset, flags=0):  # page-1 is not in the page cache
        if flags and len(views[0]) == 100_001:
            raise BlockingIOError
        return real(fd, views, offset, flags)

    monkeypatch.setattr(os, "preadv", cold)
    hang = Hang(monkeypatch, "preadv", lambda fd, views, offset, flags=0: not flags)
    assert on_time(lambda: storage.batch_get_into(keys, pages)) == [Status.OK, Status.TIMED_OUT]
    assert hang.reached.is_set()
    assert tools.bytes_of(pages[0]) == tools.bytes_of(stored[0])
    hang.release.set()
    assert hang.passed.wait(10)
    storage.close()  # the thread that hung has ended
    assert tools.bytes_of(pages[1]) == b"\xaa" * 100_001


def test_a_hung_write_times_out_and_is_never_published(opened, memory, namespace, monkeypatch, root, tools):
    storage = opened(direct_io="off")
    keys = [namespace.key(f"page-{i}") for i in range(3)]
    pages = [memory.filled(key, 10_000 + i) for i, key in enumerate(keys)]
    hang = Hang(monkeypatch, "pwritev", lambda fd, views, offset: len(views[0]) == 10_001)
    statuses = on_time(lambda: storage.batch_set_from(keys, pages))
    assert statuses == [Status.OK, Status.TIMED_OUT, Status.OK]
    pages[1][0].view[:] = b"?" * 10_001  # the caller has its memory back and uses it
    hang.release.set()
    assert hang.passed.wait(10)
    storage.close()
    assert {path.name for path in tools.pages_on_disk(root)} == {"page-0", "page-2"}
    again = opened()
    assert again._opened.directory._usage.totals().nbytes == tools.nbytes_on_disk(root)


def test_pages_that_no_thread_got_to_give_their_room_back(opened, memory, namespace, monkeypatch):
    storage = opened(direct_io="off", threads=1)
    keys = [namespace.key(f"page-{i}") for i in range(10)]
    hang = Hang(monkeypatch, "pwritev", lambda *_: True)
    statuses = on_time(lambda: storage.batch_set_from(keys, [memory.page(1000)] * 10))
    assert statuses == [Status.TIMED_OUT] * 10
    hang.release.set()
    assert hang.passed.wait(10)
    storage.close()
    assert opened().describe()["used"].startswith("0 of")


def test_a_hung_lookup_raises_deadline_error(opened, namespace, monkeypatch):
    storage = opened()
    storage.set(namespace.key("page"), memoryview(b"x"))
    hang = Hang(monkeypatch, "access", lambda *_: True)
    with pytest.raises(DeadlineError):
        on_time(lambda: storage.batch_exists([namespace.key("page")]))
    hang.release.set()
    assert storage.batch_exists([namespace.key("page")]) == [True]


def test_a_hung_get_raises_deadline_error(opened, namespace, monkeypatch):
    storage = opened()
    storage.set(namespace.key("page"), memoryview(b"x"))
    hang = Hang(monkeypatch, "preadv", lambda *_: True)
    with pytest.raises(DeadlineError):
        on_time(lambda: storage.get(namespace.key("page")))
    hang.release.set()
    assert bytes(storage.get(namespace.key("page"))) == b"x"


def test_a_full_store_answers_within_the_deadline(opened, namespace, monkeypatch, memory):
    storage = opened(capacity=10_000)
    monkeypatch.setattr("hicache_storage.directory.housekeeper.Housekeeper._evict", lambda *_: None)
    keys = [namespace.key(f"page-{i}") for i in range(20)]
    statuses = on_time(lambda: storage.batch_set_from(keys, [memory.page(1000)] * 20))
    assert statuses == [Status.OK] * 10 + [Status.FAILED] * 10
