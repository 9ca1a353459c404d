"""kill -9 at any moment: whatever is found afterwards is whole, and the store opens again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hicache_storage import Namespace
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage_file import FileSettings, FileStorage

WRITER = Path(__file__).with_name("crash_writer.py")
NAMESPACE = Namespace(model="crash")
NBYTES = 192 << 10
PAGES = 120
ROUNDS = int(os.environ.get("HICACHE_FILE_CRASH_ROUNDS", "12"))


def start_writer(root, seed):
    command = [sys.executable, str(WRITER), str(root), str(seed), str(PAGES)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_killed_writers_never_leave_a_torn_page(root, memory, tools):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    names = [f"page-{i}" for i in range(PAGES)]
    keys = [NAMESPACE.key(name) for name in names]
    pages = [memory.page(NBYTES // 2, NBYTES // 2) for _ in range(8)]
    served = 0
    for number in range(ROUNDS):
        writers = [start_writer(root, seed + 2 * number + i) for i in range(2)]
        for writer in writers:
            assert writer.stdout.readline() == b"open\n"
        for writer in chance.sample(writers, 2):
            time.sleep(chance.uniform(0, 0.15))  # the random point
            writer.send_signal(signal.SIGKILL)
        for writer in writers:
            assert writer.wait() == -signal.SIGKILL
            writer.stdout.close()
        assert {path.stat().st_size for path in tools.pages_on_disk(root)} <= {NBYTES + 4096}
        with IntegrityLayer(
            FileStorage(FileSettings(root=root, min_free=0), NAMESPACE)  # large: nothing is evicted now
        ) as store:
            for start in range(0, PAGES, 8):
                batch = slice(start, start + 8)
                statuses = store.batch_get_into(keys[batch], pages)
                assert {status.name for status in statuses} <= {"OK", "MISSING"}
                for status, name, page in zip(statuses, names[batch], pages, strict=True):
                    if status:
                        expected = random.Random(name).randbytes(4096) * (NBYTES // 4096)
                        assert tools.bytes_of(page) == expected, name
                        served += 1
            left = list((root / ".hicache" / "tmp").iterdir())
            assert len(left) == 1, "the directories of dead writers are removed"
            usage = store.inner._opened.directory._usage
            nbytes = tools.nbytes_on_disk(root)
            assert nbytes <= 16_000_000
            assert usage.totals().nbytes >= nbytes, "a crash never counts too low"
            usage.recount()
            assert usage.totals().nbytes == nbytes
    assert served > 0, "nothing was ever stored: the test tests nothing"


def test_a_writer_killed_in_the_middle_of_a_page_leaves_nothing_to_be_found(root, memory, tools):
    child = f"""
import os, signal
from hicache_storage import Namespace
from hicache_storage_file import FileSettings, FileStorage, pageio

def half(fd, views, offset, real=os.pwritev):
    real(fd, [views[0][:5000]], offset)
    os.kill(os.getpid(), signal.SIGKILL)

pageio.os.pwritev = half
namespace = Namespace(model="crash")
settings = FileSettings(root={str(root)!r}, direct_io="off", min_free=0)
FileStorage(settings, namespace).set(namespace.key("page"), memoryview(bytes(10_000)))
"""
    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == -signal.SIGKILL
    assert len(list((root / ".hicache" / "tmp").glob("*/[!l]*"))) == 1
    with FileStorage(FileSettings(root=root, min_free=0), NAMESPACE) as storage:
        key = NAMESPACE.key("page")
        assert not storage.exists(key)
        assert list((root / ".hicache" / "tmp").glob("*/[!l]*")) == []
        tools.wait_until(lambda: storage.describe()["used"].startswith("0 of"))
        storage.set(key, memoryview(b"x" * 10_000))
        assert bytes(storage.get(key)) == b"x" * 10_000


@pytest.mark.parametrize("wreck", ["tmp directory without lock", "empty shard", "file in tmp", "empty tree"])
def test_wreckage_of_any_kind_does_not_keep_the_store_from_opening(root, namespace, wreck):
    with FileStorage(FileSettings(root=root, min_free=0), namespace) as storage:
        storage.set(namespace.key("page"), memoryview(b"x"))
    if wreck == "tmp directory without lock":
        (root / ".hicache" / "tmp" / "1-dead").mkdir()
        (root / ".hicache" / "tmp" / "1-dead" / "0").write_bytes(b"half a page")
    elif wreck == "empty shard":
        (root / namespace.digest / "zz").mkdir()
    elif wreck == "file in tmp":
        (root / ".hicache" / "tmp" / "file").write_bytes(b"?")
    else:
        for path in sorted((root / ".hicache").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        (root / ".hicache").rmdir()
    with FileStorage(FileSettings(root=root, min_free=0), namespace) as storage:
        assert bytes(storage.get(namespace.key("page"))) == b"x"
        storage.set(namespace.key("more"), memoryview(b"y"))
    assert [path.name for path in (root / ".hicache" / "tmp").iterdir() if path.is_dir()] == []
