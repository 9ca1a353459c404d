"""Pages as objects of a real S3 server, through the OBJ plugin."""

import time

import pytest

from hicache_storage import CorruptError, SettingsError, Status, StorageError, UnsupportedError
from hicache_storage.deadline import deadline
from hicache_storage_nixl.conformance import ObjectCorruptor

SIZES = [(65536, 65536), (1000, 7), (1 << 20,)]


@pytest.mark.parametrize("sizes", SIZES)
def test_pages_come_back_whatever_they_are_made_of(objects, memory, namespace, tools, sizes):
    storage = objects()
    keys = namespace.keys([f"page-{sizes[0]}-{i}" for i in range(4)])
    pages = [memory.filled(key, *sizes) for key in keys]
    back = [memory.page(*sizes) for _ in keys]
    assert storage.batch_set_from(keys, pages) == [Status.OK] * 4
    missing = namespace.key("none")
    assert storage.batch_exists([*keys, missing]) == [True] * 4 + [False]
    assert storage.batch_get_into(
        [keys[0], missing, *keys[1:]], [back[0], memory.page(*sizes), *back[1:]]
    ) == [
        Status.OK,
        Status.MISSING,
        *[Status.OK] * 3,
    ]
    assert [tools.bytes_of(page) for page in back] == [tools.bytes_of(page) for page in pages]
    assert bytes(storage.get(keys[0])) == tools.bytes_of(pages[0])
    assert storage.get(missing) is None


@pytest.mark.parametrize("cut", [1, 16, 33, 4000, 8191])
def test_a_short_object_is_never_a_page_though_nixl_says_done(objects, memory, namespace, cut):
    """The page is where its own content was a moment ago: the tail that is stale is the right one."""
    storage = objects()
    key = namespace.key(f"page-{cut}")
    page = memory.filled(key, 8192)
    assert all(storage.batch_set_from([key], [page]))
    assert all(storage.batch_get_into([key], [page]))
    outside = ObjectCorruptor(storage)
    outside.write(key, outside.read(key)[:-cut])
    assert storage.batch_get_into([key], [page]) == [Status.CORRUPT]
    with pytest.raises(CorruptError):
        storage.get(key)
    assert storage.batch_set_from([key], [page]) == [Status.OK], "a set heals it"
    assert storage.batch_get_into([key], [page]) == [Status.OK]


def test_empty_foreign_and_longer_objects_are_no_pages(objects, memory, namespace):
    storage = objects()
    keys = namespace.keys(["empty", "foreign", "longer", "another"])
    pages = [memory.filled(key, 8192) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    outside = ObjectCorruptor(storage)
    outside.write(keys[0], b"")
    outside.write(keys[1], bytes(8192 + 64))
    outside.write(keys[2], outside.read(keys[2]) + bytes(64))
    outside.write(keys[3], outside.read(keys[2])[: 8192 + 64])
    assert not any(storage.batch_get_into(keys, pages))


def test_a_bucket_that_is_missing_stores_nothing_and_has_nothing(objects, server, memory, namespace):
    from hicache_storage_nixl import NixlSettings, NixlStorage

    settings = NixlSettings.model_validate({"plugin": "obj", "params": server.params(bucket="not-there")})
    key = namespace.key("page")
    with NixlStorage(settings, namespace) as storage:
        assert storage.batch_set_from([key], [memory.page(4096)]) == [Status.FAILED]
        assert storage.batch_get_into([key], [memory.page(4096)]) == [Status.MISSING]
        assert storage.batch_exists([key]) == [False]


def test_a_server_that_was_killed_fails_calls_within_their_deadline(own_server, objects, memory, namespace):
    storage = objects(own_server)
    keys = namespace.keys([f"page-{i}" for i in range(16)])
    pages = [memory.filled(key, 4096) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    own_server.stop()
    for call in (
        lambda: storage.batch_get_into(keys, pages),
        lambda: storage.batch_set_from(keys, pages),
        lambda: storage.batch_exists(keys),
    ):
        started = time.monotonic()
        with deadline(2.0):
            try:
                assert not any(call())
            except StorageError as error:
                assert error.retryable  # noqa: PT017 (both are right)
        assert time.monotonic() - started < 5


def test_what_nixl_cannot_do_with_objects_is_refused(objects, namespace):
    storage = objects()
    assert not storage.capabilities.delete
    assert not storage.capabilities.clear
    with pytest.raises(UnsupportedError):
        storage.delete([namespace.key("page")])
    with pytest.raises(UnsupportedError, match="epoch"):
        storage.clear()
    with pytest.raises(SettingsError, match="capacity"):
        objects(capacity="1GB")
