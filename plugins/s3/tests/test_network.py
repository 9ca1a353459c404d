"""TLS with a certificate authority of one's own, an HTTP proxy in between, and names of hosts."""

import json
import os
import shutil
import subprocess
import sys
import textwrap

import faulty
import pytest

from hicache_storage import SettingsError, Status, StorageError


@pytest.mark.parametrize("direct", ["on", "off"])
def test_pages_travel_over_tls_with_ones_own_authority(opened, https, authority, namespace, tools, direct):
    storage = opened(endpoint=https.url, ca_file=authority / "ca.pem", direct_get=direct, direct_put=direct)
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
    assert storage.describe()["reads"] == "through obstore: presigned requests: a proxy comes in between"
    proxy.forget()
    key = namespace.key("page")
    page, read = tools.filled(key, 300_000), tools.empty(300_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)
    assert proxy.requests["PUT"] == 1
    assert proxy.requests["GET"] == 2  # the removal token, and the page


VIRTUAL = {"endpoint": "http://s3.localhost", "addressing": "virtual"}


def test_the_bucket_may_be_in_the_name_of_the_host(opened, proxy, ministack, namespace, tools):
    """Through a proxy, which needs no name of a host to be resolved."""
    virtual = {**VIRTUAL, "endpoint": f"http://s3.localhost:{ministack.port}"}
    storage = opened(proxy=proxy.url, **virtual)
    keys = namespace.keys([f"page-{i}" for i in range(20)])
    pages = [tools.filled(key, 1000) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    assert all(storage.batch_exists(keys))
    assert {path.split("/")[2] for _, path in proxy.seen} == {f"pages.s3.localhost:{ministack.port}"}
    assert opened().get(keys[0]) == tools.bytes_of(pages[0])


def test_presigned_requests_know_the_bucket_in_the_name_of_the_host(ministack, namespace, tmp_path):
    """In a process that sees another /etc/hosts, which takes root."""
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost pages.s3.localhost\n")
    inside = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts)]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("unshare -m needs root")
    script = textwrap.dedent(
        """
        import json, sys
        from hicache_storage import Buffer, Namespace, open_storage
        with open_storage("s3", json.load(sys.stdin), Namespace(model="virtual")) as storage:
            page, read = [[Buffer.of(bytearray(byte * 500_000))] for byte in (b"x", b"y")]
            assert all(storage.batch_set_from(["page"], [page]))
            assert all(storage.batch_get_into(["page"], [read]))
            assert read[0].view == page[0].view
            said = storage.describe()
            print(said["reads"], said["writes"])
        """
    )
    virtual = {**VIRTUAL, "endpoint": f"http://s3.localhost:{ministack.port}"}
    told = ministack.settings(checksum="off", prefix=f"virtual-{namespace.epoch}", **virtual)
    done = subprocess.run(
        [*inside, sys.executable, "-c", script],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    assert done.stdout.startswith("straight into L2: presigned requests work straight from L2"), done.stderr


def test_a_proxy_may_ask_for_a_password(opened, proxy, namespace, tools):
    heard = []
    proxy.hear = lambda headers: heard.append(headers.get("Proxy-Authorization"))
    storage = opened(proxy=proxy.url.replace("http://", "http://kv:proxy-secret@"))
    assert storage.batch_exists(namespace.keys(["a"])) == [False]
    assert set(heard) == {"Basic a3Y6cHJveHktc2VjcmV0"}
    assert "proxy-secret" not in repr(storage.settings) + str(storage.describe())


def test_requests_say_who_pays(opened, proxy, namespace, tools):
    """AWS refuses what does not; presigned requests do not, so it refuses those when they are tried."""
    heard = []
    proxy.hear = lambda headers: heard.append(headers.get("x-amz-request-payer"))
    proxy.fault = lambda _, path: (
        faulty.Fault(status=403, code="AccessDenied") if "X-Amz-Sig" in path else None
    )
    storage = opened(endpoint=proxy.url, request_payer=True)
    assert storage.describe()["reads"].startswith("through obstore")
    heard.clear()
    key = namespace.key("page")
    page = tools.filled(key, 500_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [page]) == [Status.OK]
    assert storage.batch_exists([key]) == [True]
    assert set(heard) == {"requester"}
