"""Stores that do not answer: every call ends by its deadline, and nothing touches the page afterwards."""

import json
import subprocess
import sys
import threading
import time

import pytest

from hicache_storage import DeadlineError, Status
from hicache_storage.deadline import deadline

SECONDS = 0.5
GRACE = 3.0
"""What a call may take beyond its deadline on a machine that is busy."""


def on_time(call):
    started = time.monotonic()
    with deadline(SECONDS):
        answer = call()
    assert time.monotonic() - started < SECONDS + GRACE
    return answer


class Untouched:
    """Page memory that its owner has taken back."""

    def __init__(self, pages):
        self.pages = pages
        for page in pages:
            for buffer in page:
                buffer.view[:] = b"\xa5" * buffer.nbytes

    def holds(self):
        return all(bytes(b.view) == b"\xa5" * b.nbytes for page in self.pages for b in page)


def test_a_read_that_hangs_in_the_store_never_reaches_the_page(own_server, objects, memory, namespace, tools):
    storage = objects(own_server)
    keys = namespace.keys([f"page-{i}" for i in range(8)])
    pages = [memory.filled(key, 65536) for key in keys]
    back = [memory.page(65536) for _ in keys]
    assert all(storage.batch_set_from(keys, pages))
    own_server.pause()
    assert on_time(lambda: storage.batch_get_into(keys, back)) == [Status.TIMED_OUT] * 8
    mine = Untouched(back)
    with pytest.raises(DeadlineError):
        on_time(lambda: storage.batch_exists(keys))
    own_server.resume()
    with deadline(30):  # by then the late answers have come, too
        assert all(storage.batch_get_into(keys, pages))
        assert all(storage.batch_exists(keys))
    tools.wait_until(lambda: storage._opened[2]._memory._free)
    assert mine.holds()


def test_a_write_that_hangs_in_the_store_stores_the_page_as_it_was(
    own_server, objects, memory, namespace, tools
):
    storage = objects(own_server)
    keys = namespace.keys([f"page-{i}" for i in range(4)])
    pages = [memory.filled(key, 65536) for key in keys]
    wanted = [tools.bytes_of(page) for page in pages]
    own_server.pause()
    assert on_time(lambda: storage.batch_set_from(keys, pages)) == [Status.TIMED_OUT] * 4
    Untouched(pages)
    own_server.resume()
    tools.wait_until(lambda: all(storage.batch_exists(keys)))
    back = [memory.page(65536) for _ in keys]
    tools.wait_until(lambda: all(storage.batch_get_into(keys, back)))
    assert [tools.bytes_of(page) for page in back] == wanted


def test_a_frozen_file_system_costs_a_deadline_and_gets_the_page_as_it_was(
    opened, memory, namespace, tools, frozen_disk
):
    where, freeze = frozen_disk
    storage = opened(where / "store", capacity="30MB")
    keys = namespace.keys([f"page-{i}" for i in range(8)])
    pages = [memory.filled(key, 65536) for key in keys]
    wanted = [tools.bytes_of(page) for page in pages]
    thaw = freeze()
    assert on_time(lambda: storage.batch_set_from(keys, pages)) == [Status.TIMED_OUT] * 8
    Untouched(pages)
    thaw()
    back = [memory.page(65536) for _ in keys]
    with deadline(30):
        assert all(storage.batch_set_from(keys[4:], [memory.filled(key, 65536) for key in keys[4:]]))
    found = storage.batch_get_into(keys, back)
    assert found[4:] == [Status.OK] * 4
    for status, page, want in zip(found, back, wanted, strict=True):
        assert status is Status.MISSING or tools.bytes_of(page) == want


@pytest.mark.parametrize("operation", ["get", "set"])
def test_a_transfer_that_nixl_never_ends_keeps_its_slots_and_not_the_page(
    opened, memory, namespace, tools, monkeypatch, operation
):
    storage = opened()
    keys = namespace.keys([f"page-{i}" for i in range(8)])
    pages = [memory.filled(key, 65536) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    api, released = storage._opened[1]._api, threading.Event()
    transfer, check = api.transfer, api.check_xfer_state
    monkeypatch.setattr(api, "transfer", lambda handle: transfer(handle) and "PROC")
    monkeypatch.setattr(
        api, "check_xfer_state", lambda handle: check(handle) if released.is_set() else "PROC"
    )
    freed = []
    release = api.release_xfer_handle
    monkeypatch.setattr(api, "release_xfer_handle", lambda handle: (freed.append(handle), release(handle)))
    if operation == "get":
        call = lambda: storage.batch_get_into(keys, pages)  # noqa: E731
    else:
        keys = namespace.keys([f"new-{i}" for i in range(8)])
        call = lambda: storage.batch_set_from(keys, pages)  # noqa: E731
    assert on_time(call) == [Status.TIMED_OUT] * 8
    assert freed == [], "no handle is released in flight"
    mine = Untouched(pages)
    released.set()
    tools.wait_until(lambda: len(freed) == 8)
    assert mine.holds()


def test_closing_does_not_wait_for_a_store_that_hangs(own_server, objects, memory, namespace):
    storage = objects(own_server)
    keys = namespace.keys(["page"])
    own_server.pause()
    on_time(lambda: storage.batch_set_from(keys, [memory.page(4096)]))
    started = time.monotonic()
    storage.close()
    assert time.monotonic() - started < 20
    own_server.resume()


ENDS = """
import json, sys
from hicache_storage import open_storage
limits = {"exists_seconds": 0.5, "get_seconds": 0.5, "set_seconds": 0.5}
storage = open_storage("nixl", {"plugin": "obj", "params": json.loads(sys.argv[1]), **limits})
storage.set("page", memoryview(b"x"))
print("stored", flush=True)
sys.stdin.readline()
assert storage.batch_exists(["page"]) == [False]
sys.exit(3)
"""


def test_a_process_ends_with_its_status_while_its_store_hangs(own_server):
    command = [sys.executable, "-c", ENDS, json.dumps(own_server.params())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "stored\n"
        own_server.pause()
        process.communicate("go on\n", timeout=60)
    assert process.returncode == 3
