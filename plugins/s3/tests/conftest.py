"""Real servers, real pages, and a proxy that spoils answers: what the tests of the backend start from."""

import importlib.util
import itertools
import random
import shutil
import ssl
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from hicache_storage import Buffer, Namespace

if importlib.util.find_spec("obstore") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))  # test files are no package

NUMBERS = itertools.count()


def pytest_report_header():
    if importlib.util.find_spec("obstore") is None:
        return "plugins/s3: skipped, the package obstore is not installed"
    return None


def content_of(name, nbytes):
    return random.Random(name).randbytes(nbytes)


def filled(name, *sizes):
    """A page of several buffers whose bytes follow from its name."""
    content, page = content_of(name, sum(sizes)), []
    for size in sizes:
        page.append(Buffer.of(bytearray(content[:size])))
        content = content[size:]
    return page


def empty(*sizes):
    """A page with a pattern in it that no content has."""
    return [Buffer.of(bytearray(b"\xaa" * size)) for size in sizes]


def bytes_of(page):
    return b"".join(buffer.view for buffer in page)


def _started(manager, tmp_path_factory):
    import servers

    with ExitStack() as stack:
        try:
            server = stack.enter_context(manager(tmp_path_factory.mktemp(manager.__name__)))
        except servers.MissingError as error:
            pytest.skip(str(error))
        yield server


@pytest.fixture(scope="session")
def ministack(tmp_path_factory):
    import servers

    yield from _started(servers.ministack, tmp_path_factory)


@pytest.fixture(scope="session")
def rclone(tmp_path_factory):
    import servers

    yield from _started(servers.rclone, tmp_path_factory)


@pytest.fixture(scope="session")
def ceph(tmp_path_factory):
    import servers

    yield from _started(servers.ceph, tmp_path_factory)


@pytest.fixture
def proxy(ministack):
    import faulty

    proxy = faulty.Proxy(("127.0.0.1", ministack.port))
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """A certificate authority and a server certificate for 127.0.0.1, in files."""
    if shutil.which("openssl") is None:
        pytest.skip("the program openssl is not installed")
    where = tmp_path_factory.mktemp("ca")
    (where / "server.ext").write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for command in (
        ["req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=test CA"],
        ["req", *key, "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1"],
        [
            *("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial"),
            *("-days", "2", "-extfile", "server.ext", "-out", "server.pem"),
        ],
    ):
        subprocess.run(["openssl", *command], cwd=where, check=True, capture_output=True)
    return where


@pytest.fixture
def https(ministack, authority):
    import faulty

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    proxy = faulty.Proxy(("127.0.0.1", ministack.port), tls=context)
    yield proxy
    proxy.close()


@pytest.fixture
def namespace():
    """One that no other test has used."""
    return Namespace(model="test-model", dtype="bfloat16", page_size=64, epoch=next(NUMBERS))


@pytest.fixture
def opened(ministack, namespace):
    """Opens backends on MiniStack, or on ``server``, and closes them at the end."""
    from hicache_storage_s3 import S3Settings, S3Storage

    with ExitStack() as stack:

        def open_one(server=None, namespace=namespace, **settings):
            # MiniStack computes CRC64NVME in Python, at 10 MB/s
            table = (server or ministack).settings(
                **{"checksum": "off", "threads": 4, "retries": 1, **settings}
            )
            if server is not None and server.name == "ceph" and "create_bucket" not in settings:
                table["create_bucket"] = True
            return stack.enter_context(S3Storage(S3Settings(**table), namespace))

        yield open_one


@pytest.fixture
def tools():
    """Functions that tests share."""

    class Tools:
        content_of = staticmethod(content_of)
        filled = staticmethod(filled)
        empty = staticmethod(empty)
        bytes_of = staticmethod(bytes_of)

        @staticmethod
        def sent(storage, call):
            """What ``call`` returns, and the requests it took, by operation."""
            client = storage._opened.client
            before = client.requests
            result = call()
            after = client.requests
            return result, {
                name: n - before.get(name, 0) for name, n in after.items() if n > before.get(name, 0)
            }

    return Tools
