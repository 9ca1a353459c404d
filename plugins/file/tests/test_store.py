"""Pages in, pages out, and who may see them."""

import os
import shutil
import stat
import subprocess
import sys
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_storage import (
    BufferMismatchError,
    ClosedError,
    CorruptError,
    InvalidKeyError,
    Namespace,
    SettingsError,
    Status,
)
from hicache_storage.directory.tree import _names
from hicache_storage.namespace import check_name
from hicache_storage_file import FileSettings, FileStorage, pageio


def test_a_batch_comes_back_byte_for_byte(opened, memory, namespace, tools):
    storage = opened()
    shapes = [(4096,), (1,), (100, 200, 300), (4096, 8192), (0, 7, 0), (65536, 1)]
    keys = [namespace.key(f"page-{i}") for i in range(len(shapes))]
    stored = [memory.filled(key, *sizes) for key, sizes in zip(keys, shapes, strict=True)]
    assert all(storage.batch_set_from(keys, stored))
    empty = [memory.page(*sizes) for sizes in shapes]
    assert all(storage.batch_get_into(keys, empty))
    assert [tools.bytes_of(page) for page in empty] == [tools.bytes_of(page) for page in stored]


def test_a_page_may_have_more_buffers_than_one_system_call_takes(opened, memory, namespace, tools):
    storage = opened()
    key = namespace.key("layer-first")
    page, back = memory.filled(key, *[33] * 2500), memory.page(*[33] * 2500)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)


def test_short_reads_and_writes_are_continued(opened, memory, namespace, tools, monkeypatch):
    storage = opened(direct_io="off")
    for call in ("preadv", "pwritev"):
        real = getattr(os, call)

        def short(fd, views, offset, *flags, real=real):
            return real(fd, [views[0][: max(1, views[0].nbytes // 2)]], offset, *flags)

        monkeypatch.setattr(pageio.os, call, short)
    key = namespace.key("page")
    page, back = memory.filled(key, 5000, 3000), memory.page(5000, 3000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)


@pytest.mark.parametrize("direct_io", ["auto", "on", "off"])
@pytest.mark.parametrize("sizes", [(4096, 1 << 20), (3 << 20,), (2_500_001, 77)])
def test_pages_that_the_page_cache_has_lost_come_from_the_disk(
    opened, memory, namespace, tools, root, direct_io, sizes
):
    storage = opened(direct_io=direct_io)
    key = namespace.key("cold")
    page, back = memory.filled(key, *sizes), memory.page(*sizes)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    fd = os.open(tools.pages_on_disk(root)[0], os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)


def test_one_bad_page_costs_only_itself(opened, memory, namespace, tools, root):
    storage = opened()
    keys = [namespace.key(f"page-{i}") for i in range(4)]
    stored = [memory.filled(key, 4096) for key in keys]
    assert all(storage.batch_set_from(keys, stored))
    paths = {path.name: path for path in tools.pages_on_disk(root)}
    paths["page-1"].write_bytes(b"short")
    paths["page-2"].write_bytes(b"x" * 4097)
    asked = [*keys, namespace.key("absent")]
    back = [memory.page(4096) for _ in asked]
    statuses = storage.batch_get_into(asked, back)
    assert statuses == [Status.OK, Status.CORRUPT, Status.CORRUPT, Status.OK, Status.MISSING]
    assert tools.bytes_of(back[3]) == tools.bytes_of(stored[3])


def test_a_page_of_the_wrong_size_is_replaced_by_the_next_set(opened, memory, namespace, tools, root):
    storage = opened()
    key = namespace.key("page")
    page, back = memory.filled(key, 4096), memory.page(4096)
    storage.set(key, page[0].view)
    tools.pages_on_disk(root)[0].write_bytes(b"torn")
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert storage.describe()["pages"] == "1"


def test_single_calls_agree_with_batches(opened, memory, namespace):
    storage = opened()
    key = namespace.key("page")
    assert storage.get(key) is None
    assert not storage.exists(key)
    storage.set(key, memoryview(b"some bytes"))
    assert storage.exists(key)
    assert bytes(storage.get(key)) == b"some bytes"
    storage.delete([key, namespace.key("absent")])
    assert storage.batch_exists([key]) == [False]
    assert storage.describe()["used"].startswith("0 of ")


def test_the_same_key_twice_in_a_batch_is_fine(opened, memory, namespace):
    storage = opened()
    key = namespace.key("page")
    page = memory.filled(key, 4096)
    assert all(storage.batch_set_from([key] * 5, [page] * 5))
    assert storage.batch_exists([key, key]) == [True, True]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "page",
        "/page",
        "a/",
        "a/b/c",
        "../../etc/passwd",
        "a/../b",
        "../b",
        "a/..",
        ".hicache/usage",
        "a/.hidden",
        "a/b\0c",
        "a\0/b",
        "a/b\n",
        "a/" + "x" * 10_000,
        "x" * 10_000,
        "a/päge",
        "ns/\N{PILE OF POO}",
        "a/\ud800",
        "a\\b/c d",
    ],
)
def test_a_hostile_key_is_refused_by_every_call(opened, memory, root, key):
    storage = opened()
    before = sorted(root.parent.rglob("*"))
    page = [memory.page(16)]
    for call in (
        lambda: storage.get(key),
        lambda: storage.exists(key),
        lambda: storage.set(key, memoryview(b"x")),
        lambda: storage.batch_exists([key]),
        lambda: storage.batch_exists(["a/b", key, "a/c"]),
        lambda: storage.batch_get_into([key], page),
        lambda: storage.batch_set_from([key], page),
        lambda: storage.delete([key]),
    ):
        with pytest.raises(InvalidKeyError):
            call()
    assert sorted(root.parent.rglob("*")) == before


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.text(st.sampled_from("aZ9._-/\n\0 é"), max_size=6)
        | st.sampled_from(["n/" + "x" * 200, "n/" + "x" * 201]),
        max_size=4,
    ),
    st.booleans(),
)
def test_a_batch_of_keys_is_judged_like_each_of_them(parts, prefixed):
    keys = [f"n/{part}" if prefixed else part for part in parts]

    def names():
        for key in keys:
            namespace, _, name = key.partition("/")
            check_name(namespace)
            check_name(name)
            yield name.encode()

    try:
        expected = list(names())
    except InvalidKeyError:
        expected = None
    judged = _names(keys, "n") if keys else []
    same_namespace = all(key.startswith("n/") for key in keys)
    assert judged == (expected if same_namespace else None)


def test_keys_and_pages_must_be_as_many(opened, memory, namespace):
    storage = opened()
    for call in (storage.batch_get_into, storage.batch_set_from):
        with pytest.raises(BufferMismatchError):
            call([namespace.key("a")], [])


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o377])
def test_directories_are_0700_and_files_0600_whatever_the_umask(opened, memory, namespace, root, umask):
    before = os.umask(umask)
    try:
        storage = opened()
        assert all(storage.batch_set_from([namespace.key("page")], [memory.page(4096)]))
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in [root, *root.rglob("*")]}
    bookkeeping = root / ".hicache"
    for path, mode in modes.items():
        if path.is_dir():
            assert mode == 0o700, path
        elif bookkeeping in path.parents or path.name == "namespace.json":
            assert mode & 0o077 == 0, path
        else:
            assert mode == 0o600, path


def test_a_symlinked_page_is_never_followed(opened, memory, namespace, root, tmp_path):
    storage = opened()
    secret = tmp_path / "secret"
    secret.write_bytes(b"s" * 4096)
    key = namespace.key("page")
    shard = root / namespace.digest / f"{zlib.crc32(b'page') & 0xFF:02x}"
    shard.mkdir()
    (shard / "page").symlink_to(secret)
    page = memory.page(4096)
    assert storage.batch_get_into([key], [page]) == [Status.CORRUPT]
    assert not any(page[0].view)
    with pytest.raises(CorruptError):
        storage.get(key)
    filled = memory.filled(key, 4096)
    assert storage.batch_set_from([key], [filled]) == [Status.OK]
    assert secret.read_bytes() == b"s" * 4096
    assert storage.batch_get_into([key], [page]) == [Status.OK]


@pytest.mark.parametrize("level", ["namespace", "shard"])
def test_a_symlinked_directory_is_never_followed(opened, memory, namespace, root, tmp_path, level):
    storage = opened()
    outside = tmp_path / "outside"
    outside.mkdir()
    own = root / namespace.digest
    number = f"{zlib.crc32(b'page') & 0xFF:02x}"
    if level == "namespace":
        shutil.rmtree(own)
        own.symlink_to(outside)
        (outside / number).mkdir()
        (outside / number / "page").write_bytes(b"s" * 4096)
    else:
        (own / number).symlink_to(outside)
        (outside / "page").write_bytes(b"s" * 4096)
    before = sorted(outside.rglob("*"))
    key = namespace.key("page")
    assert storage.batch_get_into([key], [memory.page(4096)]) == [Status.MISSING]
    assert storage.batch_exists([key]) == [False]
    assert storage.batch_set_from([key], [memory.page(8192)]) == [Status.FAILED]
    storage.delete([key])
    storage.clear()
    assert sorted(outside.rglob("*")) == before


def test_what_is_no_file_is_no_page(opened, memory, namespace, root):
    storage = opened()
    shard = root / namespace.digest
    for name, make in (("fifo", os.mkfifo), ("directory", os.mkdir)):
        where = shard / f"{zlib.crc32(name.encode()) & 0xFF:02x}"
        where.mkdir(exist_ok=True)
        make(where / name)
        assert storage.batch_get_into([namespace.key(name)], [memory.page(4096)]) == [Status.CORRUPT]


def test_clear_removes_its_own_namespace_and_nothing_else(opened, memory, root):
    ours, theirs = Namespace(model="m/x"), Namespace(model="m-x")
    mine, other = opened(namespace=ours), opened(namespace=theirs)
    names = [f"page-{i}" for i in range(50)]
    pages = [memory.page(512)] * 50
    assert all(mine.batch_set_from([ours.key(name) for name in names], pages))
    assert all(other.batch_set_from([theirs.key(name) for name in names], pages))
    bystander = root / "notes.txt"
    bystander.write_text("mine")
    mine.clear()
    assert not any(mine.batch_exists([ours.key(name) for name in names]))
    assert all(other.batch_exists([theirs.key(name) for name in names]))
    assert bystander.read_text() == "mine"
    assert other.describe()["used"].startswith(f"{50 * 512} of")


def test_clear_is_right_while_another_storage_writes(opened, memory, namespace, tools, root):
    storage, writer = opened(), opened()
    started, stop = threading.Event(), threading.Event()
    page = memory.page(512)

    def write():
        number = 0
        while not stop.is_set():
            keys = [namespace.key(f"page-{number + i}") for i in range(16)]
            assert all(writer.batch_set_from(keys, [page] * 16))
            number += 16
            started.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert started.wait(10)
    for _ in range(5):
        storage.clear()
    stop.set()
    thread.join()
    storage.clear()
    assert tools.pages_on_disk(root) == []
    assert storage.describe()["used"].startswith("0 of")


def test_two_processes_share_pages(opened, memory, namespace, root, tools):
    storage = opened()
    key = namespace.key("from-another-process")
    child = f"""
from hicache_storage import Namespace
from hicache_storage_file import FileSettings, FileStorage
namespace = {namespace!r}
with FileStorage(FileSettings(root={str(root)!r}), namespace) as storage:
    storage.set({key!r}, memoryview(b"x" * 4096))
    assert bytes(storage.get(namespace.key("from-here"))) == b"y" * 4096
"""
    storage.set(namespace.key("from-here"), memoryview(b"y" * 4096))
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)
    page = memory.page(4096)
    assert storage.batch_get_into([key], [page]) == [Status.OK]
    assert tools.bytes_of(page) == b"x" * 4096
    assert storage.describe()["pages"] == "2"


def test_a_removed_tree_is_made_anew_under_a_live_server(opened, memory, namespace, root):
    storage, reader = opened(), opened()
    keys = [namespace.key(f"page-{i}") for i in range(20)]
    pages = [memory.filled(key, 4096) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    shutil.rmtree(root)
    assert not any(storage.batch_exists(keys))
    assert storage.batch_get_into(keys[:1], [memory.page(4096)]) == [Status.MISSING]
    assert all(storage.batch_set_from(keys, pages))
    assert all(storage.batch_exists(keys))
    reader._opened.directory._housekeeper.refresh()
    assert all(reader.batch_exists(keys))
    assert int(storage.describe()["pages"]) >= 20
    storage._opened.directory._usage.recount()
    assert storage.describe()["pages"] == "20"


def test_it_works_with_hardly_any_descriptors(opened, memory, namespace, monkeypatch):
    monkeypatch.setattr("hicache_storage.directory.tree._spare_descriptors", lambda: 3)
    storage = opened()
    before = len(os.listdir("/proc/self/fd"))
    keys = [namespace.key(f"page-{i}") for i in range(200)]
    pages = [memory.filled(key, 64) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    assert all(storage.batch_exists(keys))
    assert all(storage.batch_get_into(keys, pages))
    assert len(os.listdir("/proc/self/fd")) <= before + 4


def test_in_a_forked_child_it_says_so_instead_of_hanging(opened, namespace):
    storage = opened()
    # what a child sees; forking a process with threads is no test's business
    storage._opened.directory.pid += 1
    for call in (lambda: storage.exists(namespace.key("a")), lambda: storage.set(namespace.key("a"), b"")):
        with pytest.raises(ClosedError, match="forked"):
            call()
    storage._opened.directory.pid -= 1


def test_after_close_every_call_raises_closed_error(opened, memory, namespace):
    storage = opened()
    storage.close()
    storage.close()
    key, page = namespace.key("a"), memory.page(16)
    for call in (
        lambda: storage.get(key),
        lambda: storage.exists(key),
        lambda: storage.set(key, memoryview(b"x")),
        lambda: storage.batch_exists([key]),
        lambda: storage.batch_get_into([key], [page]),
        lambda: storage.batch_set_from([key], [page]),
        lambda: storage.delete([key]),
        storage.clear,
        storage.describe,
    ):
        with pytest.raises(ClosedError):
            call()


def test_pages_are_there_after_reopening(opened, memory, namespace, tools):
    key = namespace.key("page")
    page = memory.filled(key, 4096)
    first = opened()
    assert first.batch_set_from([key], [page]) == [Status.OK]
    first.close()
    assert bytes(opened().get(key)) == tools.bytes_of(page)


def test_direct_io_on_is_refused_where_the_disk_cannot(root, namespace, monkeypatch):
    monkeypatch.setattr("hicache_storage.directory.pages.direct_works", lambda directory: False)
    with pytest.raises(SettingsError, match="direct_io"):
        FileStorage(FileSettings(root=root, direct_io="on"), namespace)


def test_direct_io_auto_falls_back_and_says_so_once(opened, root, namespace, monkeypatch, caplog):
    monkeypatch.setattr("hicache_storage.directory.pages.direct_works", lambda directory: False)
    storage = opened(direct_io="auto")
    storage.set(namespace.key("a"), memoryview(b"x"))
    assert caplog.text.count("O_DIRECT") == 1
    assert storage.describe()["direct_io"].startswith("never")


def test_a_file_system_without_nowait_reads_by_way_of_the_bounce(
    opened, memory, namespace, tools, monkeypatch
):
    def refuse(fd, views, offset, flags=0, real=os.preadv):
        if flags:
            raise OSError(95, "not supported")
        return real(fd, views, offset)

    storage = opened(direct_io="off")
    key = namespace.key("page")
    page, back = memory.filled(key, 3_000_000), memory.page(3_000_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    monkeypatch.setattr(pageio.os, "preadv", refuse)
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)


def test_a_tmpfs_is_read_straight_into_the_page(opened, memory, namespace, small_disk, tools):
    storage = opened(small_disk / "store")
    key = namespace.key("page")
    page, back = memory.filled(key, 1_000_000), memory.page(1_000_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)


def test_storages_may_open_and_close_at_the_same_time(root, namespace):
    problems = []

    def work(number):
        for i in range(25):
            try:
                settings = FileSettings(root=root, min_free=0, threads=1)
                with FileStorage(settings, namespace) as storage:
                    storage.set(namespace.key(f"{number}-{i}"), memoryview(bytes(100)))
            except Exception as error:
                problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    with FileStorage(FileSettings(root=root, min_free=0), namespace) as storage:
        assert int(storage.describe()["pages"]) >= 100, "a recount while others write may count too much"
        storage._opened.directory._usage.recount()
        assert storage.describe()["pages"] == "100"
        assert len(list((root / ".hicache" / "tmp").iterdir())) == 1


def test_many_threads_may_call_at_once(opened, namespace, tools):
    storage = opened(capacity="40MB")
    problems = []

    def work(number):
        memory = tools.Memory(4 << 20)
        keys = [namespace.key(f"page-{(number * 7 + i) % 60}") for i in range(40)]
        pages = [memory.filled(key, 10_000) for key in keys]
        back = [memory.page(10_000) for _ in keys]
        for _ in range(10):
            if not all(storage.batch_set_from(keys, pages)):
                problems.append("not stored")
            statuses = storage.batch_get_into(keys, back)
            for status, got, put in zip(statuses, back, pages, strict=True):
                if not status or tools.bytes_of(got) != tools.bytes_of(put):
                    problems.append(f"{status} or wrong bytes")
            storage.batch_exists(keys)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
