"""Real NIXL agents, real directories, a real S3 server: what every test of the backend starts from."""

import contextlib
import http.client
import importlib.util
import json
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from hicache_storage import Buffer, Namespace, open_storage

INSTALLED = all(map(importlib.util.find_spec, ("hicache_storage_nixl", "nixl_cu12")))
if INSTALLED:
    from hicache_storage_nixl import NixlSettings, NixlStorage
else:
    collect_ignore_glob = ["test_*.py"]

# no look-ups of credentials on a network that may not be there
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

NAMESPACE = Namespace(model="test-model", dtype="bfloat16", page_size=64)
BUCKET = "pages"


def pytest_report_header():
    return None if INSTALLED else "plugins/nixl: skipped, see make test-nixl"


def content_of(name, nbytes):
    return random.Random(name).randbytes(nbytes)


def bytes_of(page):
    return b"".join(buffer.view for buffer in page)


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


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def namespace():
    return NAMESPACE


@pytest.fixture
def root(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def opened(root, memory):
    """Opens bare storages on ``root`` (or another one), with ``memory`` registered."""
    with ExitStack() as stack:

        def open_one(where=None, **settings):
            table = {"plugin": "posix", "root": where or root, "capacity": "1GB", "min_free": 0, **settings}
            storage = stack.enter_context(NixlStorage(NixlSettings.model_validate(table), NAMESPACE))
            storage.register_buffer(memory.whole)
            return storage

        yield open_one


@dataclass
class Server:
    """MiniStack in a process of its own."""

    process: subprocess.Popen
    port: int
    client: object

    def params(self, **more):
        return {
            "bucket": BUCKET,
            "endpoint_override": f"http://127.0.0.1:{self.port}",
            "scheme": "http",
            "req_checksum": "required",  # the server takes seconds to check what nobody asked for
            "region": "us-east-1",
            "access_key": "test",
            "secret_key": "test",
            **more,
        }

    def pause(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def stop(self):
        with contextlib.suppress(ProcessLookupError):
            self.resume()
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def started(directory):
    import boto3

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "BIND_HOST": "127.0.0.1",
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": "127.0.0.1",
        "SERVICES": "s3",
        "IOT_MTLS_ENABLED": "0",
        "S3_PERSIST": "1",
        "S3_DATA_DIR": f"{directory}/objects",
        "STATE_DIR": f"{directory}/state",
        "LOG_LEVEL": "ERROR",
    }
    command = [sys.executable, "-c", "from ministack.app import main; main()"]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=directory)
    client = boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )
    server = Server(process, port, client)
    try:
        ends_at = time.monotonic() + 60
        while not answers(port):
            assert process.poll() is None, (directory / "server.log").read_text()
            assert time.monotonic() < ends_at, "the S3 server does not start"
            time.sleep(0.05)
        client.create_bucket(Bucket=BUCKET)
        yield server
    finally:
        server.stop()


def answers(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """One server for tests that leave it as it is."""
    with started(tmp_path_factory.mktemp("s3")) as one:
        yield one


@pytest.fixture
def own_server(tmp_path):
    """A server to be paused and killed."""
    with started(tmp_path) as one:
        yield one


@pytest.fixture
def objects(server, memory):
    """Opens bare storages on the server's bucket, each test under a prefix of its own."""
    prefix = f"{time.monotonic_ns()}/"
    with ExitStack() as stack:

        def open_one(on=server, **settings):
            table = {"plugin": "obj", "prefix": prefix, **settings, "params": on.params()}
            storage = stack.enter_context(NixlStorage(NixlSettings.model_validate(table), NAMESPACE))
            storage.register_buffer(memory.whole)
            return storage

        yield open_one


@pytest.fixture
def frozen_disk(tmp_path):
    """An ext4 file system, and a function that freezes it: who writes hangs in the kernel until it thaws."""
    image, where = tmp_path / "image", tmp_path / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False)
    mounted = made.returncode or subprocess.run(
        ["mount", "-o", "loop", str(image), str(where)], capture_output=True, check=False
    )
    if made.returncode or mounted.returncode:
        pytest.skip("mounting an image of ext4 takes root and a loop device")

    def thaw():
        subprocess.run(["fsfreeze", "-u", str(where)], capture_output=True, check=False)

    rescue = threading.Timer(60, thaw)  # whatever becomes of the test: a frozen disk cannot be killed
    rescue.start()

    def freeze():
        subprocess.run(["fsfreeze", "-f", str(where)], check=True)
        return thaw

    try:
        yield where, freeze
    finally:
        rescue.cancel()
        thaw()
        subprocess.run(["umount", "-l", str(where)], check=True)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 24 MiB; skips where mounting is not allowed."""
    where = tmp_path / "small"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)], capture_output=True, check=False
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
        open_storage = staticmethod(open_storage)
        dumps = staticmethod(json.dumps)

        @staticmethod
        def wait_until(condition, seconds=20):
            ends_at = time.monotonic() + seconds
            while not condition():
                assert time.monotonic() < ends_at, "it did not come to pass"
                time.sleep(0.01)

        @staticmethod
        def staged(root):
            return [path for path in (root / ".hicache" / "tmp").glob("*/*") if path.name != "lock"]

    return Tools
