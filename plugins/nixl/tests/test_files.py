"""Pages as files, through the POSIX plugin: what comes back, and what a bad page costs."""

import json
import os
import resource
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from hicache_storage import (
    Buffer,
    BufferMismatchError,
    CapacityError,
    ClosedError,
    CorruptError,
    InvalidKeyError,
    SettingsError,
    Status,
)
from hicache_storage.deadline import deadline

WAYS = [{"use_aio": True}, {"use_uring": True}]
SECONDS = [None, 30.0]
"""Without a deadline pages are moved as they lie, with one they pass through slots."""


@pytest.mark.parametrize("params", WAYS, ids=["aio", "uring"])
@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize(
    "sizes",
    [(4096, 8192), (1 << 20,), (1000, 1, 7), (4096,) * 160, ()],
    ids=["kv", "mla", "odd", "layers", "empty"],
)
def test_every_shape_of_page_comes_back(opened, memory, namespace, tools, params, direct_io, seconds, sizes):
    storage = opened(params=params, direct_io=direct_io)
    keys = namespace.keys([f"page-{i}" for i in range(5)])
    pages = [memory.filled(key, *sizes) for key in keys]
    back = [memory.page(*sizes) for _ in keys]
    with deadline(seconds):
        assert storage.batch_set_from(keys, pages) == [Status.OK] * 5
        assert storage.batch_exists(keys) == [True] * 5
        assert storage.batch_get_into(keys, back) == [Status.OK] * 5
    assert [tools.bytes_of(page) for page in back] == [tools.bytes_of(page) for page in pages]


@pytest.mark.parametrize("seconds", SECONDS)
def test_one_missing_page_costs_only_itself(opened, memory, namespace, seconds):
    storage = opened()
    keys = namespace.keys([f"page-{i}" for i in range(128)])
    pages = [memory.filled(key, 4096, 4096) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    storage.delete([keys[77]])
    with deadline(seconds):
        statuses = storage.batch_get_into(keys, pages)
    assert statuses == [Status.MISSING if i == 77 else Status.OK for i in range(128)]


@pytest.mark.parametrize("seconds", SECONDS)
def test_files_that_are_no_whole_page_are_corrupt(opened, memory, namespace, root, seconds):
    storage = opened()
    keys = namespace.keys([f"page-{i}" for i in range(6)])
    pages = [memory.filled(key, 8192) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    short, empty, long, directory, link, _ = [next(root.glob(f"*/??/page-{i}")) for i in range(6)]
    os.truncate(short, 4096)
    os.truncate(empty, 0)
    os.truncate(long, 16384)
    directory.unlink()
    directory.mkdir()
    link.rename(link.with_name("elsewhere"))
    link.symlink_to(link.with_name("elsewhere"))
    with deadline(seconds):
        assert storage.batch_get_into(keys, pages) == [Status.CORRUPT] * 5 + [Status.OK]
    with pytest.raises(CorruptError):
        storage.get(keys[3])
    short.unlink()
    assert storage.batch_set_from([keys[0]], [pages[0]]) == [Status.OK]


def test_a_file_cut_short_while_it_is_read_is_no_page(opened, memory, namespace, root, monkeypatch):
    storage = opened()
    key = namespace.key("page")
    page = memory.filled(key, 1 << 20)
    assert all(storage.batch_set_from([key], [page]))
    transfer = storage._opened[1]._api.transfer

    def cut_first(handle):
        os.truncate(next(root.glob("*/??/page")), 4096)
        return transfer(handle)

    monkeypatch.setattr(storage._opened[1]._api, "transfer", cut_first)
    assert storage.batch_get_into([key], [page]) == [Status.CORRUPT]


def test_memory_that_was_not_registered_is_refused_where_it_would_be_used(opened, namespace):
    storage = opened()
    page = [Buffer.of(bytearray(4096))]
    key = namespace.key("page")
    with pytest.raises(BufferMismatchError, match="register_buffer"):
        storage.batch_set_from([key], [page])
    storage.set(key, memoryview(bytes(4096)))
    with pytest.raises(BufferMismatchError, match="register_buffer"):
        storage.batch_get_into([key], [page])
    with deadline(30):
        assert storage.batch_get_into([key], [page]) == [Status.OK], "slots need nothing registered"


def test_a_full_disk_refuses_pages_and_keeps_no_part_of_them(opened, memory, namespace, small_disk, tools):
    where = small_disk / "store"
    storage = opened(where, capacity="1GB", min_free=0)
    keys = namespace.keys([f"page-{i}" for i in range(12)])
    pages = [memory.filled(key, 2 << 20) for key in keys]
    # reserved room is no longer there when it is written: somebody else fills the disk
    filler = small_disk / "filler"
    filler.write_bytes(bytes(20 << 20))
    storage._opened[2]._directory._housekeeper.spare = lambda: 1 << 30
    statuses = storage.batch_set_from(keys, pages)
    assert Status.FAILED in statuses
    assert tools.staged(where) == []
    stored = [path.stat().st_size for path in where.glob("[!.]*/??/*")]
    assert stored == [2 << 20] * len(stored), "no part of a page has a name"
    with pytest.raises(CapacityError):
        storage.set(namespace.key("late"), memoryview(bytes(8 << 20)))
    filler.unlink()
    tools.wait_until(lambda: all(storage.batch_set_from(keys[:4], pages[:4])))
    assert all(storage.batch_get_into(keys[:4], pages[:4]))


def test_it_keeps_within_its_capacity(opened, memory, namespace, tools, root):
    storage = opened(capacity=1 << 20)
    pages = [memory.page(64 << 10) for _ in range(64)]
    for i in range(0, 64, 8):
        keys = namespace.keys([f"page-{n}" for n in range(i, i + 8)])
        tools.wait_until(lambda keys=keys, i=i: all(storage.batch_set_from(keys, pages[i : i + 8])))
    tools.wait_until(lambda: sum(path.stat().st_size for path in root.glob("[!.]*/??/*")) <= 1 << 20)


def test_more_pages_than_descriptors_are_moved_a_few_at_a_time(opened, memory, namespace):
    storage = opened()
    keys = namespace.keys([f"page-{i}" for i in range(200)])
    pages = [memory.filled(key, 4096) for key in keys]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, limits[1]))
    try:
        for seconds in SECONDS:
            with deadline(seconds):
                assert storage.batch_set_from(keys, pages) == [Status.OK] * 200
                assert storage.batch_get_into(keys, pages) == [Status.OK] * 200
            storage.clear()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert len(os.listdir("/proc/self/fd")) <= used + 256, "at most the directories stay open"


def test_more_buffers_than_nixl_has_descriptors_for_are_moved_in_time(opened, memory, namespace, tools):
    storage = opened(params={"use_aio": True, "ios_pool_size": 1024})
    keys = namespace.keys([f"page-{i}" for i in range(40)])
    pages = [memory.filled(key, *[512] * 100) for key in keys]  # 4,000 buffers
    back = [memory.page(*[512] * 100) for _ in keys]
    with ThreadPoolExecutor(4) as pool:
        assert all(map(all, pool.map(lambda _: storage.batch_set_from(keys, pages), range(4))))
        assert all(map(all, pool.map(lambda _: storage.batch_get_into(keys, back), range(4))))
    assert [tools.bytes_of(page) for page in back] == [tools.bytes_of(page) for page in pages]


@pytest.mark.parametrize("params", WAYS, ids=["aio", "uring"])
def test_eight_threads_share_one_agent(opened, namespace, tools, params):
    storage = opened(params=params)
    wrong = []

    def work(number):
        memory = tools.Memory(1 << 20)
        storage.register_buffer(memory.whole)
        keys = namespace.keys([f"page-{number}-{i}" for i in range(8)])
        pages = [memory.filled(key, 8192, 4096) for key in keys]
        back = [memory.page(8192, 4096) for _ in keys]
        for turn in range(20):
            with deadline(30 if turn % 2 else None):
                done = storage.batch_set_from(keys, pages) + storage.batch_get_into(keys, back)
            if not all(done) or any(map(lambda a, b: tools.bytes_of(a) != tools.bytes_of(b), pages, back)):
                wrong.append((number, turn, done))
            storage.delete(keys)
        storage.unregister_buffer(memory.whole)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []


ANOTHER = """
import json, sys
from hicache_storage import Namespace, open_storage
table, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
namespace = Namespace(model="test-model", dtype="bfloat16", page_size=64)
with open_storage(sys.argv[3], table, namespace) as storage:
    storage.set("of the other".replace(" ", "-"), memoryview(b"said there"))
    print([bytes(storage.get(name)).decode() for name in names])
"""


@pytest.mark.parametrize("backend", ["nixl", "file"])
def test_two_processes_read_each_others_pages(namespace, root, tools, backend):
    ours = {"plugin": "posix", "root": str(root), "capacity": "1GB", "min_free": 0}
    theirs = ours if backend == "nixl" else {k: v for k, v in ours.items() if k != "plugin"}
    with tools.open_storage("nixl", ours, namespace) as storage:
        storage.set("of-ours", memoryview(b"said here"))
        command = [sys.executable, "-c", ANOTHER, json.dumps(theirs), '["of-ours"]', backend]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert said.strip() == "['said here']"
        assert bytes(storage.get("of-the-other")) == b"said there"


def test_no_call_works_in_a_forked_child_or_after_close(opened, namespace):
    storage = opened()
    storage._pid += 1  # what a child sees; forking a process with threads is no test's business
    with pytest.raises(ClosedError, match="forked"):
        storage.exists(namespace.key("a"))
    storage._pid -= 1
    storage.close()
    with pytest.raises(ClosedError, match="closed"):
        storage.exists(namespace.key("a"))
    storage.close()


def test_keys_that_lead_elsewhere_are_refused(opened, memory):
    storage = opened()
    with pytest.raises(InvalidKeyError):
        storage.batch_get_into(["../../etc/passwd"], [memory.page(8)])


def test_a_plugin_that_moves_files_needs_a_root(opened):
    with pytest.raises(SettingsError, match="root"):
        opened(root=None)
