"""TLS with a certificate authority of one's own, and an HTTP proxy in between."""

import shutil
import ssl
import subprocess

import faulty
import pytest

from hicache_storage import SettingsError, Status, StorageError


@pytest.fixture(scope="module")
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    proxy = faulty.Proxy(("127.0.0.1", ministack.port), tls=context)
    yield proxy
    proxy.close()


@pytest.mark.parametrize("direct_get", ["on", "off"])
def test_pages_travel_over_tls_with_ones_own_authority(
    opened, https, authority, namespace, tools, direct_get
):
    storage = opened(endpoint=https.url, ca_file=authority / "ca.pem", direct_get=direct_get)
    keys = namespace.keys([f"page-{i}" for i in range(6)])
    pages = [tools.filled(key, 64, 300_000, 300_000) for key in keys]
    read = [tools.empty(64, 300_000, 300_000) for _ in keys]
    assert storage.batch_set_from(keys, pages) == [Status.OK] * 6
    for _ in range(2):
        assert storage.batch_get_into(keys, read) == [Status.OK] * 6
        assert list(map(tools.bytes_of, read)) == list(map(tools.bytes_of, pages))


def test_an_unknown_authority_is_refused(opened, https):
    with pytest.raises(StorageError):
        opened(endpoint=https.url, retries=0)


def test_a_ca_file_without_certificates_is_named(opened, tmp_path):
    (tmp_path / "empty.pem").write_text("nothing\n")
    with pytest.raises(SettingsError, match=r"ca_file|S3 client"):
        opened(endpoint="https://127.0.0.1:1", ca_file=tmp_path / "empty.pem", retries=0)


def test_everything_goes_through_the_proxy_when_there_is_one(opened, proxy, namespace, tools):
    storage = opened(proxy=proxy.url)
    assert storage.describe()["reads"] == "through obstore: a proxy comes in between to a presigned request"
    proxy.forget()
    key = namespace.key("page")
    page, read = tools.filled(key, 300_000), tools.empty(300_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)
    assert proxy.requests["PUT"] == 1
    assert proxy.requests["GET"] == 2  # the removal token, and the page
