"""A real master and real store owners, each in a process of its own, on random ports of loopback."""

import hashlib
import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
from contextlib import ExitStack

import pytest

from hicache_storage import Buffer, Namespace, open_storage

INSTALLED = importlib.util.find_spec("hicache_storage_mooncake") is not None
if INSTALLED:
    from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
    from hicache_storage_mooncake.client import close_idle
    from hicache_storage_mooncake.library import MooncakeMissingError, load
    from hicache_storage_mooncake.processes import Log, start_master, start_owner
else:
    collect_ignore_glob = ["test_*.py"]

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")

NAMESPACE = Namespace(model="test-model", dtype="bfloat16", page_size=64)
CLIENT_TTL = 3
"""Seconds after which the tests' masters forget an owner that is gone (default 10)."""

MISSING = ""
if INSTALLED:
    try:
        load()
    except MooncakeMissingError as error:
        MISSING = str(error)


def pytest_report_header():
    return None if INSTALLED else "plugins/mooncake: skipped, see make test-mooncake"


def pytest_collection_modifyitems(items):
    here = os.path.dirname(__file__)
    for item in items:
        if MISSING and str(item.path).startswith(here) and "wheel" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=MISSING))


def pytest_configure(config):
    config.addinivalue_line("markers", "wheel: needs Mooncake's wheel and the libraries it is linked to")


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def content_of(name, nbytes):
    return hashlib.shake_128(name.encode()).digest(nbytes)


class Memory:
    """Page-aligned memory like L2, cut into pages of several buffers."""

    def __init__(self, nbytes=32 << 20):
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


def bytes_of(page):
    return b"".join(buffer.view for buffer in page)


class Cluster:
    """One master, its owners, and clients of it."""

    def __init__(self, log, *flags):
        self._stack = ExitStack()
        self._log = log
        self._flags = (f"--client_ttl={CLIENT_TTL}", *flags)
        self.port, self.metrics_port = free_port(), free_port()
        self.owners = []
        self.start_master()

    def start_master(self):
        self.master = self._stack.enter_context(
            start_master(self.port, self.metrics_port, *self._flags, log=Log(self._log))
        )
        self._stack.callback(close_idle)

    def add_owner(self, mib=64, ssd_path=None, **environment):
        log = Log(self._log, environment)
        owner = start_owner(self.master.address, mib << 20, ssd_path, log)
        self.owners.append(self._stack.enter_context(owner))
        return owner

    def table(self, **settings):
        return {
            "master_server_address": self.master.address,
            "master_metrics_port": self.metrics_port,
            "protocol": "tcp",
            "global_segment_size": 0,
            **settings,
        }

    def open(self, namespace=NAMESPACE, **settings):
        """The bare plugin."""
        storage = MooncakeStorage(MooncakeSettings(**self.table(**settings)), namespace)
        return self._stack.enter_context(storage)

    def stack(self, namespace=NAMESPACE, **settings):
        """The plugin behind all of the SDK's layers."""
        return self._stack.enter_context(open_storage("mooncake", self.table(**settings), namespace))

    def elsewhere(self, script, *arguments, **options):
        """Run a Python script in another process; it finds the settings in the first argument."""
        command = [sys.executable, "-c", script, json.dumps(self.table()), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, **options)

    def close(self):
        """Everything in reverse: clients while their master lives, as it holds them up otherwise."""
        self._stack.close()


@pytest.fixture
def log(tmp_path):
    return tmp_path / "mooncake.log"


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory):
    """A master and one owner of 256 MiB, for tests that leave them as they are."""
    cluster = Cluster(tmp_path_factory.mktemp("mooncake") / "mooncake.log")
    try:
        cluster.add_owner(256)
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def cluster(log):
    """A master of one's own, to be killed and stopped."""
    cluster = Cluster(log)
    try:
        yield cluster
    finally:
        cluster.close()


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture(scope="session")
def tools():
    """Functions that tests share (test files are no package, so they cannot import them)."""

    class Tools:
        Cluster = Cluster
        Memory = Memory
        NAMESPACE = NAMESPACE
        CLIENT_TTL = CLIENT_TTL
        content_of = staticmethod(content_of)
        bytes_of = staticmethod(bytes_of)
        free_port = staticmethod(free_port)

    return Tools
