"""Real directories, real pages: what every test of the file backend starts from."""

import mmap
import random
import subprocess
import time
from contextlib import ExitStack, suppress

import pytest

from hicache_storage import Buffer, Namespace
from hicache_storage_file import FileSettings, FileStorage

NAMESPACE = Namespace(model="test-model", dtype="bfloat16", page_size=64)


class Memory:
    """Page-aligned memory like L2, cut into pages of several buffers."""

    def __init__(self, nbytes=16 << 20):
        self.whole = Buffer.of(mmap.mmap(-1, nbytes))
        self._next = 0

    def page(self, *sizes):
        buffers = []
        for size in sizes:
            buffers.append(self.whole.slice(self._next, size))
            self._next += size
        return buffers

    def filled(self, name, *sizes):
        """A page whose bytes follow from its name."""
        page = self.page(*sizes)
        content = content_of(name, sum(sizes))
        for buffer in page:
            buffer.view[:], content = content[: buffer.nbytes], content[buffer.nbytes :]
        return page


def content_of(name, nbytes):
    return random.Random(name).randbytes(nbytes)


def bytes_of(page):
    return b"".join(buffer.view for buffer in page)


@pytest.fixture
def namespace():
    return NAMESPACE


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(root):
    """Opens storages on ``root`` (or another one) and closes them at the end."""
    with ExitStack() as stack:

        def open_one(where=None, namespace=NAMESPACE, **settings):
            settings = {"capacity": "1GB", "min_free": 0, "threads": 2, **settings}
            storage = FileStorage(FileSettings(root=where or root, **settings), namespace)
            return stack.enter_context(storage)

        yield open_one


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 4 MiB; skips where mounting is not allowed."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs takes root")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def tools():
    """Functions that tests share (test files are no package, so they cannot import them)."""

    class Tools:
        Memory = Memory
        content_of = staticmethod(content_of)
        bytes_of = staticmethod(bytes_of)

        @staticmethod
        def wait_until(condition, seconds=20):
            ends_at = time.monotonic() + seconds
            while not condition():
                assert time.monotonic() < ends_at, "it did not come to pass"
                time.sleep(0.01)

        @staticmethod
        def pages_on_disk(root):
            return sorted(root.glob("[!.]*/??/*"))

        @staticmethod
        def nbytes_on_disk(root):
            total = 0
            for path in root.glob("[!.]*/??/*"):
                with suppress(FileNotFoundError):  # evicted meanwhile
                    total += path.stat().st_size
            return total

    return Tools
