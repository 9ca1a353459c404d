"""What the backend promises on any S3 server."""

import os
import subprocess
import sys
import textwrap

import pytest

from hicache_storage import ClosedError, InvalidKeyError, Namespace, Status, open_storage

SIZES = (64, 200_000, 200_000)


@pytest.fixture(params=["ministack", "rclone", "ceph"])
def server(request):
    return request.getfixturevalue(request.param)


def test_pages_come_back_byte_for_byte(opened, server, namespace, tools):
    storage = opened(server)
    keys = namespace.keys([f"page-{i}" for i in range(8)])
    pages = [tools.filled(key, *SIZES) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    read = [tools.empty(*SIZES) for _ in keys]
    assert all(storage.batch_get_into(keys, read))
    assert list(map(tools.bytes_of, read)) == list(map(tools.bytes_of, pages))
    assert storage.get(keys[0]) == tools.bytes_of(pages[0])


@pytest.mark.parametrize("direct_get", ["on", "off"])
@pytest.mark.parametrize("sizes", [(1,), (65_536,), (3, 100_000, 1), (64, 5 << 20, 1 << 20)])
def test_both_ways_to_read_give_the_same_bytes(opened, server, namespace, tools, direct_get, sizes):
    storage = opened(server, direct_get=direct_get, part_size=5 << 20)
    key = namespace.key("page")
    page, read = tools.filled(key, *sizes), tools.empty(*sizes)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)


@pytest.mark.parametrize("direct_put", ["on", "off"])
@pytest.mark.parametrize("sizes", [(1,), (400_000,), (3, 400_000, 1), (1,) * 2000 + (400_000,)], ids=len)
def test_both_ways_to_store_give_the_same_object(opened, server, namespace, tools, direct_put, sizes):
    storage = opened(server, direct_put=direct_put)
    key = namespace.key("page")
    page = tools.filled(key, *sizes)
    for _ in range(2):
        assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.get(key) == tools.bytes_of(page)


def test_a_checksum_that_nobody_verifies_is_not_computed(opened, ceph):
    said = opened(ceph, checksum="auto").describe()
    assert said["checksum"] == "off: the store takes a wrong one"
    assert said["writes"].startswith("straight from L2")


def test_an_upload_that_breaks_off_stores_nothing(opened, server, namespace):
    """What writes straight from L2 rely on: a page is not stored unless it was sent in full."""
    import socket

    storage = opened(server)
    key = namespace.key("half")
    scheme, _, rest = storage._opened.client.sign("PUT", key).partition("://")
    host, _, target = rest.partition("/")
    with socket.create_connection(("127.0.0.1", server.port), 10) as connection:
        head = f"PUT /{target} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 100000\r\n\r\n"
        connection.sendall(head.encode() + b"x" * 50_000)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(10)
        while connection.recv(4096):
            pass
    assert scheme == "http"
    assert not storage.exists(key)


def test_what_the_layer_above_does_with_each_page_is_done_in_time(opened, namespace, tools):
    """A checksum is computed from a page that has arrived, and before its bytes leave."""
    from hicache_storage.page_hook import per_page

    storage = opened()
    keys = namespace.keys([f"page-{i}" for i in range(8)])
    pages, read = [tools.empty(500_000) for _ in keys], [tools.empty(500_000) for _ in keys]
    seen = []
    with per_page(lambda i: pages[i][0].view.__setitem__(slice(None), tools.content_of(keys[i], 500_000))):
        assert all(storage.batch_set_from(keys, pages))
    with per_page(lambda i: seen.append((i, tools.bytes_of(read[i])))):
        assert all(storage.batch_get_into([*keys[:-1], namespace.key("gone")], read)[:-1])
    assert sorted(seen) == [(i, tools.content_of(keys[i], 500_000)) for i in range(7)]


def test_missing_and_wrongly_sized_pages_have_their_own_status(opened, server, namespace, tools):
    storage = opened(server)
    keys = namespace.keys(["there", "longer", "missing"])
    storage.batch_set_from(keys[:2], [tools.filled("a", 100_000), tools.filled("b", 100_001)])
    wanted = [Status.OK, Status.CORRUPT, Status.MISSING]
    assert storage.batch_get_into(keys, [tools.empty(100_000) for _ in keys]) == wanted
    assert storage.batch_exists(keys) == [True, True, False]


def test_a_corrupt_page_is_replaced_by_the_next_write(opened, namespace, tools):
    storage = opened()
    key = namespace.key("page")
    storage.set(key, memoryview(b"too short"))
    assert storage.batch_get_into([key], [tools.empty(100_000)]) == [Status.CORRUPT]
    page, read = tools.filled("right", 100_000), tools.empty(100_000)
    assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)


def test_clear_removes_its_namespace_and_no_other(opened, server, namespace, tools):
    other = Namespace(model="other", epoch=namespace.epoch)
    mine, theirs = opened(server), opened(server, other)
    for storage, owner in ((mine, namespace), (theirs, other)):
        keys = owner.keys([f"page-{i}" for i in range(20)])
        assert all(storage.batch_set_from(keys, [tools.filled(key, 100) for key in keys]))
    mine.clear()
    assert mine.batch_exists(namespace.keys([f"page-{i}" for i in range(20)])) == [False] * 20
    assert theirs.batch_exists(other.keys([f"page-{i}" for i in range(20)])) == [True] * 20


def test_two_processes_share_pages(server, namespace, tools):
    names = [f"page-{i}" for i in range(20)]
    settings = server.settings(checksum="off", create_bucket=True)
    script = textwrap.dedent(
        """
        import json, sys
        from hicache_storage import Buffer, Namespace, open_storage
        settings, epoch, names = json.load(sys.stdin)
        with open_storage("s3", settings, Namespace(model="shared", epoch=epoch)) as storage:
            pages = [[Buffer.of(bytearray(name.encode() * 20_000))] for name in names]
            assert all(storage.batch_set_from(names, pages))
        """
    )
    import json

    told = json.dumps([settings, namespace.epoch, names]).encode()
    subprocess.run([sys.executable, "-c", script], input=told, check=True, timeout=60)
    with open_storage("s3", settings, Namespace(model="shared", epoch=namespace.epoch)) as storage:
        assert all(storage.batch_exists(names))
        read = [tools.empty(len(name) * 20_000) for name in names]
        assert all(storage.batch_get_into(names, read))
        assert [tools.bytes_of(page) for page in read] == [name.encode() * 20_000 for name in names]


def test_large_pages_go_up_in_parts_and_are_whole(opened, namespace, tools):
    storage = opened(part_size=5 << 20)
    key = namespace.key("large")
    sizes = (64, 6 << 20, 6 << 20)
    page, read = tools.filled(key, *sizes), tools.empty(*sizes)
    statuses, sent = tools.sent(storage, lambda: storage.batch_set_from([key], [page]))
    assert statuses == [Status.OK]
    assert sent["PUT"] == 5  # begin, three parts, complete
    assert storage.batch_get_into([key], [read]) == [Status.OK]
    assert tools.bytes_of(read) == tools.bytes_of(page)
    statuses, sent = tools.sent(storage, lambda: storage.batch_set_from([key], [page]))
    assert statuses == [Status.OK]
    assert sent == {"HEAD": 1}


def test_the_service_verifies_what_it_is_sent(opened, namespace, tools):
    storage = opened(checksum="auto")
    assert storage.describe()["checksum"] == "crc64nvme: an answer 400 for a wrong one"
    assert storage.describe()["writes"].startswith("through obstore: a presigned request carries no checksum")
    key = namespace.key("page")
    assert storage.batch_set_from([key], [tools.filled(key, 1000)]) == [Status.OK]


def test_a_storage_is_closed_after_close_and_after_fork(opened, namespace):
    storage = opened()
    storage._opened.pid -= 1
    with pytest.raises(ClosedError, match="forked"):
        storage.exists(namespace.key("page"))
    storage._opened.pid = os.getpid()
    storage.close()
    storage.close()
    with pytest.raises(ClosedError):
        storage.exists(namespace.key("page"))


@pytest.mark.parametrize("key", ["", "page", "/page", "a/../b", "a/.removed", "a/b/c"])
def test_keys_that_could_name_something_else_are_refused(opened, key):
    with pytest.raises(InvalidKeyError):
        opened().exists(key)
