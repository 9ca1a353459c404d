"""Masters and owners that are gone, stopped or back again: misses, in time, and then pages again."""

import threading
import time

import pytest

from hicache_storage import Status, UnavailableError
from hicache_storage_mooncake.master import answers, endpoints

pytestmark = pytest.mark.wheel

SIZE = 200_000
LATE = 0.3
"""What a call may take beyond its deadline on a machine that runs other tests too."""


def until(holds, seconds):
    """Seconds until ``holds()``; fails after ``seconds``."""
    started = time.monotonic()
    while not holds():
        assert time.monotonic() - started < seconds, f"not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - started


def timed(call):
    started = time.monotonic()
    result = call()
    return result, time.monotonic() - started


class Pauses(threading.Thread):
    """The longest time for which no Python thread ran."""

    def __init__(self):
        super().__init__(daemon=True)
        self.longest = 0.0
        self._ended = threading.Event()

    def run(self):
        last = time.monotonic()
        while not self._ended.wait(0.005):
            now = time.monotonic()
            self.longest = max(self.longest, now - last)
            last = now

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()


@pytest.fixture
def memory(tools):
    return tools.Memory(16 << 20)


@pytest.fixture
def stack(cluster, memory):
    """A client behind the layers with short deadlines, a batch that is stored, and pages to read into."""
    cluster.add_owner(64)
    deadlines = {"exists_seconds": 0.5, "get_seconds": 0.5, "set_seconds": 0.5}
    stack = cluster.stack(**deadlines)
    stack.register_buffer(memory.whole)
    return stack


NAMES = [f"page-{i}" for i in range(8)]


def put(stack, memory, names=NAMES):
    return stack.batch_set_from(names, [memory.filled(name, SIZE) for name in names])


def test_no_master_at_the_start_is_said_at_once(tools, monkeypatch):
    from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage, client

    monkeypatch.setattr(client, "OPEN_SECONDS", 0.2)
    settings = MooncakeSettings(master_server_address=f"127.0.0.1:{tools.free_port()}", protocol="tcp")
    with Pauses() as pauses, pytest.raises(UnavailableError, match="no Mooncake master answers"):
        MooncakeStorage(settings, tools.NAMESPACE)
    assert pauses.longest < LATE  # setup would have held the GIL for 90 s


def test_a_hung_master_at_the_start_is_noticed(cluster, tools, monkeypatch):
    from hicache_storage_mooncake import client

    monkeypatch.setattr(client, "OPEN_SECONDS", 0.2)
    cluster.master.pause()
    with Pauses() as pauses, pytest.raises(UnavailableError):
        cluster.open()
    cluster.master.resume()
    assert pauses.longest < LATE


def test_a_hung_master_costs_one_deadline_and_nobody_is_paused(cluster, stack, memory):
    assert all(put(stack, memory))
    pages = [memory.page(SIZE) for _ in NAMES]
    cluster.master.pause()
    with Pauses() as pauses:
        found, took = timed(lambda: stack.batch_get_into(NAMES, pages))
        assert not any(found)
        assert took < 0.5 + LATE
        more, took = timed(lambda: [stack.batch_exists(NAMES) for _ in range(20)] + [put(stack, memory)])
        assert not any(any(answer) for answer in more)
        assert took < LATE
    assert pauses.longest < LATE
    cluster.master.resume()
    until(lambda: all(stack.batch_exists(NAMES)), 2.0)
    assert all(stack.batch_get_into(NAMES, pages))


def test_late_answers_touch_no_page(cluster, stack, memory, tools):
    assert all(put(stack, memory))
    pages = [memory.page(SIZE) for _ in NAMES]
    cluster.master.pause()
    assert not any(stack.batch_get_into(NAMES, pages))
    for page in pages:
        page[0].view[:] = b"\xaa" * SIZE
    cluster.master.resume()
    until(lambda: all(stack.batch_exists(NAMES)), 2.0)
    assert {tools.bytes_of(page) for page in pages} == {b"\xaa" * SIZE}


def test_a_killed_master_costs_at_most_one_deadline(cluster, stack, memory):
    assert all(put(stack, memory))
    pages = [memory.page(SIZE) for _ in NAMES]
    cluster.master.kill()
    with Pauses() as pauses:
        for _ in range(4):
            found, took = timed(lambda: stack.batch_get_into(NAMES, pages))
            assert not any(found)
            assert took < 0.5 + LATE
        _, took = timed(lambda: [stack.batch_exists(NAMES) for _ in range(20)])
        assert took < LATE
    assert pauses.longest < LATE


def test_a_restarted_master_is_used_again_within_two_seconds(cluster, stack, memory, tools):
    assert all(put(stack, memory))
    cluster.master.kill()
    for _ in range(4):
        stack.batch_exists(NAMES)
    cluster.start_master()
    cluster.add_owner(64)  # of the old one, only what its owner mounts again is left
    until(lambda: all(put(stack, memory, NAMES[:2])), 2.0)
    pages = [memory.page(SIZE) for _ in NAMES[:2]]
    until(lambda: all(stack.batch_get_into(NAMES[:2], pages)), 2.0)
    assert [tools.bytes_of(page) for page in pages] == [tools.content_of(name, SIZE) for name in NAMES[:2]]


def test_pages_of_a_dead_owner_are_misses_that_are_remembered(cluster, memory, tools):
    owner = cluster.add_owner(64)
    storage = cluster.open(lost_seconds=60.0)
    storage.register_buffer(memory.whole)
    keys = tools.NAMESPACE.keys(NAMES)
    pages = [memory.filled(key, SIZE) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    owner.kill()
    assert all(storage.batch_exists(keys))  # the master does not know yet: this is the lie
    assert storage.batch_get_into(keys, pages) == [Status.MISSING] * len(keys)
    assert not any(storage.batch_exists(keys))
    (found, took) = timed(lambda: storage.batch_get_into(keys, pages))
    assert found == [Status.MISSING] * len(keys)
    assert took < LATE


def test_pages_of_a_dead_owner_are_stored_anew_elsewhere(cluster, memory, tools):
    owner = cluster.add_owner(64)
    storage = cluster.open()
    storage.register_buffer(memory.whole)
    keys = tools.NAMESPACE.keys(NAMES)
    pages = [memory.filled(key, SIZE) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    owner.kill()
    assert not any(storage.batch_get_into(keys, pages))
    cluster.add_owner(64)
    for key, page in zip(keys, pages, strict=True):
        page[0].view[:] = tools.content_of(key, SIZE)
    until(lambda: all(storage.batch_set_from(keys, pages)), tools.CLIENT_TTL + 5.0)
    assert all(storage.batch_get_into(keys, pages))
    assert [tools.bytes_of(page) for page in pages] == [tools.content_of(key, SIZE) for key in keys]


def test_an_owner_killed_in_the_middle_of_batches_harms_no_byte(cluster, memory, tools):
    owner = cluster.add_owner(64)
    storage = cluster.open()
    storage.register_buffer(memory.whole)
    keys = tools.NAMESPACE.keys([f"mid-{i}" for i in range(32)])
    pages = [memory.filled(key, SIZE) for key in keys]
    statuses = storage.batch_set_from(keys, pages)
    assert all(statuses)
    wrong, rounds = [], threading.Event()

    def read():
        while not ended.is_set():
            target = tools.Memory(32 * SIZE)
            with_target = [target.page(SIZE) for _ in keys]
            storage.register_buffer(target.whole)
            found = storage.batch_get_into(keys, with_target)
            wrong.extend(
                key
                for key, page, status in zip(keys, with_target, found, strict=True)
                if status and tools.bytes_of(page) != tools.content_of(key, SIZE)
            )
            storage.unregister_buffer(target.whole)
            rounds.set()

    ended = threading.Event()
    reader = threading.Thread(target=read)
    reader.start()
    rounds.wait(10)
    owner.kill()
    rounds.clear()
    rounds.wait(20)
    ended.set()
    reader.join(20)
    assert wrong == []
    assert not reader.is_alive()


def test_a_hung_owner_ends_with_the_deadline(cluster, stack, memory):
    assert all(put(stack, memory))
    pages = [memory.page(SIZE) for _ in NAMES]
    cluster.owners[0].pause()
    found, took = timed(lambda: stack.batch_get_into(NAMES, pages))
    cluster.owners[0].resume()
    assert not any(found)
    assert took < 0.5 + LATE


def test_closing_and_opening_beside_a_hung_master_pauses_nobody_and_breaks_nothing(
    cluster, tools, monkeypatch
):
    from hicache_storage_mooncake import client

    monkeypatch.setattr(client, "OPEN_SECONDS", 0.2)
    own = {"global_segment_size": "32mb"}
    storage = cluster.open(**own)
    storage.set(tools.NAMESPACE.key("a"), memoryview(b"before"))
    cluster.master.pause()
    with Pauses() as pauses:
        _, took = timed(storage.close)
        assert took < 1.0 + 1.5  # rpc_seconds, and what else of Mooncake's waits for the master
        with pytest.raises(UnavailableError):
            cluster.open(**own)
    assert pauses.longest < LATE
    cluster.master.resume()
    reopened = cluster.open(**own)
    reopened.set(tools.NAMESPACE.key("b"), memoryview(b"after"))
    assert reopened.get(tools.NAMESPACE.key("b")) == b"after"


def test_a_master_is_alive_when_it_reacts(cluster):
    server = endpoints(cluster.master.address)[0]
    assert answers(server, 1.0)
    cluster.master.pause()
    assert not answers(server, 0.2)
    cluster.master.resume()
    cluster.master.kill()
    assert not answers(server, 0.2)
