"""A disk that is full, read-only or broken is a state to survive: writes are refused, reads go on."""

import contextlib
import errno
import os
import resource
import subprocess
import sys

import pytest

from hicache_storage import AccessDeniedError, CapacityError, Status, UnavailableError
from hicache_storage.directory import writer
from hicache_storage_file import pageio


def until_refused(take):
    with contextlib.suppress(OSError):
        while True:
            take()


def test_a_store_larger_than_its_disk_keeps_working(opened, small_disk, namespace, tools):
    """4 MiB of disk, no limit but the disk: eviction makes room when the kernel says ENOSPC."""
    storage = opened(small_disk / "store", capacity="1GB", min_free=0, direct_io="off")
    memory = tools.Memory(1 << 20)
    page = memory.filled("page", 256 << 10)
    keys = [namespace.key(f"page-{i}") for i in range(100)]
    stored = sum(bool(storage.batch_set_from([key], [page])[0]) for key in keys)
    assert stored >= 90
    back = memory.page(256 << 10)
    newest = [key for key in keys[-8:] if storage.exists(key)]
    assert newest
    for key in newest:
        assert storage.batch_get_into([key], [back]) == [Status.OK]
        assert tools.bytes_of(back) == tools.bytes_of(page)
    assert list((small_disk / "store" / ".hicache" / "tmp").glob("*/[!l]*")) == []


def test_a_disk_filled_by_others_refuses_writes_and_serves_reads(opened, small_disk, namespace, tools):
    root = small_disk / "store"
    storage = opened(root, min_free=0, direct_io="off")
    memory = tools.Memory(8 << 20)
    page, back = memory.filled("page", 1 << 20), memory.page(1 << 20)
    big = memory.page(2 << 20)
    assert storage.batch_set_from([namespace.key("small")], [page]) == [Status.OK]
    with (small_disk / "others").open("wb", buffering=0) as others:
        until_refused(lambda: others.write(bytes(1 << 16)))
    assert storage.batch_get_into([namespace.key("small")], [back]) == [Status.OK]
    assert tools.bytes_of(back) == tools.bytes_of(page)
    # evicting everything would not make room for these: nothing is evicted in vain
    assert storage.batch_set_from([namespace.key("a"), namespace.key("b")], [big, big]) == [Status.FAILED] * 2
    assert storage.batch_get_into([namespace.key("small")], [back]) == [Status.OK]
    assert storage.describe()["refused"].startswith("2 pages")

    # the store opens again on the full disk, and again has room once the disk has
    storage.close()
    again = opened(root, min_free=0, direct_io="off")
    assert again.batch_get_into([namespace.key("small")], [back]) == [Status.OK]
    (small_disk / "others").unlink()
    assert again.batch_set_from([namespace.key("c")], [big]) == [Status.OK]


def test_min_free_is_kept_free(opened, small_disk, namespace, tools):
    storage = opened(small_disk / "store", capacity="1GB", min_free="1MiB", direct_io="off")
    page = tools.Memory(1 << 20).page(128 << 10)
    for i in range(60):
        storage.batch_set_from([namespace.key(f"page-{i}")], [page])
        disk = os.statvfs(small_disk)
        assert disk.f_bavail * disk.f_frsize >= 1 << 20


def test_a_file_size_limit_of_the_process_is_no_room(root):
    child = f"""
import resource
from hicache_storage import CapacityError, Namespace
from hicache_storage_file import FileSettings, FileStorage
namespace = Namespace()
with FileStorage(FileSettings(root={str(root)!r}, min_free=0), namespace) as storage:
    storage.set(namespace.key("small"), memoryview(b"x" * 5000))
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    try:
        storage.set(namespace.key("large"), memoryview(b"x" * 20000))
    except CapacityError:
        print("refused")
    assert bytes(storage.get(namespace.key("small"))) == b"x" * 5000
    assert not storage.exists(namespace.key("large"))
"""
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "refused\n"


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, CapacityError),
        (errno.EDQUOT, CapacityError),
        (errno.EROFS, AccessDeniedError),
        (errno.EACCES, AccessDeniedError),
        (errno.EPERM, AccessDeniedError),
        (errno.EMFILE, UnavailableError),
        (errno.EIO, UnavailableError),
        (errno.ESTALE, UnavailableError),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwritev", "rename"])
def test_a_write_that_the_system_refuses_is_refused_and_counted(
    opened, memory, namespace, monkeypatch, tools, root, call, number, error
):
    storage = opened(direct_io="off")
    held, back = memory.filled("held", 4096), memory.page(4096)
    assert storage.batch_set_from([namespace.key("held")], [held]) == [Status.OK]

    real = getattr(os, call)

    def refuse(*arguments, **options):
        if call == "open" and not arguments[1] & os.O_EXCL:
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(writer.os if call == "rename" else pageio.os, call, refuse)
        key = namespace.key("page")
        with pytest.raises(error):
            storage.set(key, memoryview(b"x" * 4096))
        assert storage.batch_set_from([key, key], [held, held]) == [Status.FAILED] * 2
    assert not storage.exists(key)
    assert storage.describe()["refused"].startswith("3 pages")
    # ENOSPC and EDQUOT let the evictor free as much as was refused, so the held page may be gone
    if error is not CapacityError:
        assert storage.batch_get_into([namespace.key("held")], [back]) == [Status.OK]
        assert tools.bytes_of(back) == tools.bytes_of(held)
    assert storage.batch_set_from([key], [held]) == [Status.OK]
    assert list((root / ".hicache" / "tmp").glob("*/[!l]*")) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_read_that_fails_costs_only_its_page(opened, memory, namespace, monkeypatch, call, number):
    storage = opened(direct_io="off")
    keys = [namespace.key(f"page-{i}") for i in range(3)]
    pages = [memory.filled(key, 4096 + i) for i, key in enumerate(keys)]
    assert all(storage.batch_set_from(keys, pages))

    real = getattr(os, call)

    def refuse(*arguments, **options):
        bad = arguments[0] == "page-1" if call == "open" else arguments[1][0].nbytes == 4097
        if bad:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(pageio.os, call, refuse)
        assert storage.batch_get_into(keys, pages) == [Status.OK, Status.FAILED, Status.OK]
    assert all(storage.batch_get_into(keys, pages))


def test_a_read_only_disk_says_so_at_opening(opened, small_disk):
    opened(small_disk / "store", direct_io="off").close()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(AccessDeniedError, match="Read-only"):
        opened(small_disk / "store", direct_io="off")


def test_running_out_of_descriptors_gives_back_what_the_store_keeps(opened, memory, namespace):
    storage = opened()
    keys = [namespace.key(f"page-{i}") for i in range(300)]
    pages = [memory.filled(key, 64) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    hoard = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 8, limits[1]))
    try:
        until_refused(lambda: hoard.append(os.open("/dev/null", os.O_RDONLY)))
        storage.batch_get_into(keys, pages)
        assert all(storage.batch_get_into(keys, pages))
        more = [namespace.key(f"more-{i}") for i in range(50)]
        assert all(storage.batch_set_from(more, pages[:50]))
    finally:
        for fd in hoard:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
