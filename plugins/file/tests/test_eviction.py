"""The store stays within its limits and forgets what was not used for longest."""

import os
import subprocess
import threading
import time

import pytest

from hicache_storage import CapacityError, Status
from hicache_storage.directory import evict
from hicache_storage.directory import usage as usage_module
from hicache_storage.directory.evict import Remover, free, sweep
from hicache_storage.directory.tree import Tree
from hicache_storage.directory.usage import Usage
from hicache_storage_file import FileSettings, FileStorage


def age(tools, root, seconds_by_name):
    for path in tools.pages_on_disk(root):
        used = time.time() - seconds_by_name[path.name]
        os.utime(path, (used, used))


def test_the_store_never_outgrows_its_capacity(opened, memory, namespace, tools, root):
    storage = opened(capacity=100_000)
    page = memory.page(1000)
    for start in range(0, 400, 20):
        keys = [namespace.key(f"page-{start + i}") for i in range(20)]
        assert all(storage.batch_set_from(keys, [page] * 20))
        assert tools.nbytes_on_disk(root) <= 100_000


def test_eviction_keeps_the_pages_used_last(opened, memory, namespace, tools, root):
    storage = opened(capacity=100_000, low_watermark=0.5, high_watermark=0.9)
    page = memory.page(1000)
    names = [f"page-{i:02}" for i in range(80)]
    keys = [namespace.key(name) for name in names]
    assert all(storage.batch_set_from(keys, [page] * 80))
    age(tools, root, {name: 1000 - i for i, name in enumerate(names)})
    used = keys[:10]  # the oldest, but read again
    assert all(storage.batch_get_into(used, [page] * 10))
    more = [namespace.key(f"more-{i:02}") for i in range(15)]
    assert all(storage.batch_set_from(more, [page] * 15))
    tools.wait_until(lambda: tools.nbytes_on_disk(root) <= 50_000)
    assert all(storage.batch_exists(used))
    assert all(storage.batch_exists(more))
    assert storage.batch_exists(keys[10:]) == sorted(storage.batch_exists(keys[10:]))


def test_setting_a_page_that_is_there_counts_as_use(opened, memory, namespace, tools, root):
    storage = opened()
    key = namespace.key("page")
    assert storage.batch_set_from([key], [memory.page(100)]) == [Status.OK]
    age(tools, root, {"page": 1000})
    inode = tools.pages_on_disk(root)[0].stat().st_ino
    assert storage.batch_set_from([key], [memory.page(100)]) == [Status.OK]
    status = tools.pages_on_disk(root)[0].stat()
    assert time.time() - status.st_mtime < 100
    assert status.st_ino == inode, "the page was written again"


def test_a_large_store_is_sampled_and_still_loses_its_oldest(
    opened, memory, namespace, tools, root, monkeypatch
):
    monkeypatch.setattr(evict, "EXACT_PAGES", 100)
    monkeypatch.setattr(evict, "SAMPLE_PAGES", 500)
    storage = opened()
    names = [f"page-{i:04}" for i in range(2000)]
    page = memory.page(10)
    assert all(storage.batch_set_from([namespace.key(name) for name in names], [page] * 2000))
    age(tools, root, {name: 3000 - i for i, name in enumerate(names)})
    tree = Tree(root)
    remover = Remover(tree, Usage(tree))
    free(tree, Usage(tree), 10_000, remover)
    assert 10_000 <= remover.nbytes <= 10_010
    left = {path.name for path in tools.pages_on_disk(root)}
    assert len(left) == 1000
    assert sum(name in left for name in names[1500:]) == 500
    assert sum(name in left for name in names[:500]) < 25


def test_a_page_that_is_being_read_may_be_evicted(opened, memory, namespace, tools, root):
    storage = opened()
    key = namespace.key("page")
    page = memory.filled(key, 100_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    with tools.pages_on_disk(root)[0].open("rb") as reading:
        first = reading.read(10)
        storage.clear()
        assert not storage.exists(key)
        assert first + reading.read() == tools.bytes_of(page)


@pytest.mark.parametrize("how", ["chattr", "monkeypatch"])
def test_a_page_that_cannot_be_removed_does_not_stop_eviction(
    opened, memory, namespace, tools, root, monkeypatch, caplog, how
):
    storage = opened(capacity=100_000)
    page = memory.page(1000)
    names = [f"page-{i:02}" for i in range(90)]
    assert all(storage.batch_set_from([namespace.key(name) for name in names], [page] * 90))
    age(tools, root, {name: 1000 - i for i, name in enumerate(names)})
    stuck = [path for path in tools.pages_on_disk(root) if path.name in names[:3]]
    if how == "chattr":
        if subprocess.run(["chattr", "+i", *map(str, stuck)], capture_output=True, check=False).returncode:
            pytest.skip("this file system or user cannot make files immutable")
    else:

        def refuse(name, *, dir_fd, real=os.unlink):
            if name in names[:3]:
                raise OSError(16, "Device or resource busy")
            real(name, dir_fd=dir_fd)

        monkeypatch.setattr("hicache_storage.directory.tree.os.unlink", refuse)
    try:
        for i in range(20):
            keys = [namespace.key(f"more-{i}-{j}") for j in range(10)]
            assert all(storage.batch_set_from(keys, [page] * 10))
            assert tools.nbytes_on_disk(root) <= 100_000
        assert {path.name for path in stuck} <= {path.name for path in tools.pages_on_disk(root)}
        assert "cannot be removed" in caplog.text
        assert storage.describe()["stuck"].startswith("3 pages")
    finally:
        if how == "chattr":
            subprocess.run(["chattr", "-i", *map(str, stuck)], check=True)


def test_a_page_larger_than_the_store_is_refused_at_once(opened, memory, namespace):
    storage = opened(capacity=10_000)
    started = time.monotonic()
    with pytest.raises(CapacityError):
        storage.set(namespace.key("page"), memoryview(bytes(10_001)))
    assert time.monotonic() - started < 0.9
    assert storage.batch_set_from([namespace.key("fits")], [memory.page(10_000)]) == [Status.OK]


def test_a_batch_larger_than_the_store_is_stored_as_far_as_it_fits(opened, memory, namespace, tools, root):
    storage = opened(capacity=10_000)
    keys = [namespace.key(f"page-{i}") for i in range(30)]
    statuses = storage.batch_set_from(keys, [memory.page(1000)] * 30)
    assert statuses.count(Status.OK) >= 10
    assert set(statuses) <= {Status.OK, Status.FAILED}
    assert tools.nbytes_on_disk(root) <= 10_000


def test_several_storages_share_one_limit(opened, memory, namespace, tools, root):
    storages = [opened(capacity=200_000) for _ in range(3)]
    page = memory.page(1000)
    over = []

    def measure():  # while nobody writes: a scan takes its time, and what it sees was never there at once
        over.append(tools.nbytes_on_disk(root) > 200_000)

    together = threading.Barrier(3, measure)

    def write(number):
        for start in range(0, 300, 10):
            keys = [namespace.key(f"{number}-{start + i}") for i in range(10)]
            storages[number].batch_set_from(keys, [page] * 10)
            together.wait(30)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(over)
    tools.wait_until(lambda: tools.nbytes_on_disk(root) <= 190_000)
    assert storages[0]._opened.directory._usage.totals().nbytes >= tools.nbytes_on_disk(root)


def test_usage_is_exact_once_nobody_writes(opened, memory, namespace, tools, root):
    storage = opened()
    keys = [namespace.key(f"page-{i}") for i in range(100)]
    assert all(storage.batch_set_from(keys, [memory.page(i + 1) for i in range(100)]))
    storage.delete(keys[::3])
    assert storage._opened.directory._usage.totals().nbytes == tools.nbytes_on_disk(root)


@pytest.mark.parametrize("damage", ["removed", "emptied", "garbage"])
def test_a_lost_usage_file_is_counted_anew(opened, memory, namespace, tools, root, damage):
    storage = opened()
    keys = [namespace.key(f"page-{i}") for i in range(50)]
    assert all(storage.batch_set_from(keys, [memory.page(1000)] * 50))
    storage.close()
    usage = root / ".hicache" / "usage"
    if damage == "removed":
        usage.unlink()
    else:
        usage.write_bytes(b"" if damage == "emptied" else b"?" * 5000)
    assert opened().describe()["used"].startswith("50000 of")


def test_a_recount_sets_counters_right_that_a_crash_left_too_high(opened, namespace, monkeypatch):
    monkeypatch.setattr(usage_module, "ABANDONED_SECONDS", -1)
    storage = opened()
    storage.set(namespace.key("page"), memoryview(bytes(100)))
    usage = storage._opened.directory._usage
    usage.reserve([(7, 1_000_000)], 1 << 40, 1 << 40)  # and the writer dies
    assert usage.totals().nbytes == 1_000_100
    usage.recount()
    assert usage.totals().nbytes == 100


def test_the_first_to_open_drops_the_reservations_of_the_dead(opened, tools):
    storage = opened()
    storage._opened.directory._usage.reserve([(7, 1_000_000)], 1 << 40, 1 << 40)  # and the writer dies
    second = opened()
    assert second._opened.directory._usage.totals().nbytes == 1_000_000, "the first one lives"
    storage.close()
    second.close()
    third = opened()
    tools.wait_until(lambda: third._opened.directory._usage.totals().nbytes == 0)


def test_a_full_store_with_wrong_counters_recovers_by_itself(opened, memory, namespace, monkeypatch, tools):
    monkeypatch.setattr(usage_module, "ABANDONED_SECONDS", -1)
    storage = opened(capacity=100_000)
    phantoms = [(i, 390) for i in range(256)]
    storage._opened.directory._usage.reserve(phantoms, 1 << 40, 1 << 40)
    page = memory.page(1000)
    tools.wait_until(lambda: storage.batch_set_from([namespace.key("page")], [page]) == [Status.OK])


def test_sweep_removes_by_age(opened, memory, namespace, tools, root):
    storage = opened()
    names = [f"page-{i}" for i in range(10)]
    assert all(storage.batch_set_from([namespace.key(name) for name in names], [memory.page(10)] * 10))
    age(tools, root, {name: 100 * i for i, name in enumerate(names)})
    tree = Tree(root)
    remover = Remover(tree, Usage(tree))
    sweep(tree, time.time_ns() - 450 * 10**9, remover)
    assert {path.name for path in tools.pages_on_disk(root)} == set(names[:5])


def test_the_evictor_of_a_dead_process_blocks_nobody(root, namespace, memory):
    """Whoever holds evict.lock when the store is closed or killed gives it back to the kernel."""
    settings = FileSettings(root=root, capacity=50_000, min_free=0)
    for i in range(3):
        with FileStorage(settings, namespace) as storage:
            keys = [namespace.key(f"{i}-{j}") for j in range(60)]
            assert storage.batch_set_from(keys, [memory.page(1000)] * 60).count(Status.OK) >= 50
