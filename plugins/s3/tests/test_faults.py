"""A store that misbehaves: no wrong byte, no call over its deadline, no late write."""

import threading
import time

import faulty
import pytest

from hicache_storage import DeadlineError, Status, StorageError, open_storage
from hicache_storage.deadline import deadline

SIZES = (64, 250_000, 250_000)
NBYTES = sum(SIZES)
PATIENCE = 0.5
MARGIN = 0.6
"""What a call may take beyond its deadline on a machine that does other things too."""


def pages_only(fault):
    """This fault for answers that hold a page, none for all else."""
    return lambda method, path: fault if method == "GET" and "/page-" in path else None


def everything(fault):
    return lambda *_: fault


def on_time(call):
    began = time.monotonic()
    with deadline(PATIENCE):
        result = call()
    assert time.monotonic() - began < PATIENCE + MARGIN
    return result


@pytest.fixture(params=["on", "off"], ids=["direct", "obstore"])
def direct(request):
    return request.param


@pytest.fixture
def stored(opened, namespace, proxy, tools, direct):
    """A storage behind the proxy, keys of 4 stored pages, and these pages."""
    storage = opened(endpoint=proxy.url, direct_get=direct, direct_put=direct, connect_seconds=0.5)
    keys = namespace.keys([f"page-{i}" for i in range(4)])
    pages = [tools.filled(key, *SIZES) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    return storage, keys, pages


@pytest.mark.parametrize(
    "fault",
    [
        faulty.Fault(keep=0),
        faulty.Fault(keep=100_000),
        faulty.Fault(keep=NBYTES - 1),
        faulty.Fault(status=500),
        faulty.Fault(status=503, code="SlowDown"),
        faulty.Fault(status=403, code="AccessDenied"),
        faulty.Fault(announce=5),
        faulty.Fault(announce=-5, keep=NBYTES - 5),
        faulty.Fault(hole=True),
        faulty.Fault(drip=0.05),
        faulty.Fault(stall_at=200_000),
    ],
    ids=lambda fault: repr(fault)[6:-1] if isinstance(fault, faulty.Fault) else fault,
)
def test_no_fault_gives_a_page_that_is_not_ok_or_takes_too_long(stored, proxy, tools, fault):
    storage, keys, _pages = stored
    proxy.fault = pages_only(fault)
    read = [tools.empty(*SIZES) for _ in keys]
    statuses = on_time(lambda: storage.batch_get_into(keys, read))
    assert not any(statuses)
    assert Status.MISSING not in statuses, "the page is there"
    after = [tools.bytes_of(page) for page in read]
    proxy.fault = None
    proxy.released.set()
    storage.close()  # whatever was under way has ended
    assert [tools.bytes_of(page) for page in read] == after, "bytes came after the call had returned"


def test_faults_of_one_page_do_not_cost_the_others(stored, proxy, tools):
    storage, keys, pages = stored
    proxy.fault = lambda method, path: faulty.Fault(keep=5000) if "page-2" in path else None
    read = [tools.empty(*SIZES) for _ in keys]
    statuses = on_time(lambda: storage.batch_get_into(keys, read))
    assert [bool(status) for status in statuses] == [True, True, False, True]
    for i in (0, 1, 3):
        assert tools.bytes_of(read[i]) == tools.bytes_of(pages[i])


def test_a_failure_that_passes_costs_a_retry_and_nothing_else(stored, proxy, tools):
    storage, keys, pages = stored
    failed = set()
    lock = threading.Lock()

    def first_time(method, path):
        name = path.partition("?")[0]
        with lock:
            if name in failed:
                return None
            failed.add(name)
        return faulty.Fault(status=503, code="SlowDown")

    proxy.fault = first_time
    read = [tools.empty(*SIZES) for _ in keys]
    with deadline(10):
        assert all(storage.batch_get_into(keys, read))
    assert [tools.bytes_of(page) for page in read] == [tools.bytes_of(page) for page in pages]
    assert storage._opened._persistence.slowed > 0


def test_bytes_after_the_page_do_not_reach_the_next_one(stored, proxy, tools):
    storage, keys, pages = stored
    proxy.fault = pages_only(
        faulty.Fault(extra=f"HTTP/1.1 200 OK\r\nContent-Length: {NBYTES}\r\n\r\nlies".encode())
    )
    for _ in range(3):
        read = [tools.empty(*SIZES) for _ in keys]
        statuses = on_time(lambda read=read: storage.batch_get_into(keys, read))
        for status, page, wanted in zip(statuses, read, pages, strict=True):
            assert not status or tools.bytes_of(page) == tools.bytes_of(wanted)


@pytest.mark.parametrize("flip", [0, 70, 200_000])
def test_wrong_bytes_are_a_miss_and_the_page_is_written_anew(ministack, proxy, namespace, tools, flip):
    settings = ministack.settings(endpoint=proxy.url, checksum="off", breaker=False)
    with open_storage("s3", settings, namespace) as storage:
        names = [f"page-{i}" for i in range(4)]
        pages = [tools.filled(name, 300_000) for name in names]
        assert all(storage.batch_set_from(names, pages))
        proxy.fault = pages_only(faulty.Fault(flip=flip))
        read = [tools.empty(300_000) for _ in names]
        assert storage.batch_get_into(names, read) == [Status.CORRUPT] * 4
        assert storage.batch_exists(names) == [False] * 4
        proxy.fault = None
        assert all(storage.batch_set_from(names, pages))
        assert all(storage.batch_get_into(names, read))
        assert [tools.bytes_of(page) for page in read] == [tools.bytes_of(page) for page in pages]


def test_a_record_or_token_with_wrong_bytes_makes_no_page_present(opened, namespace, proxy, tools):
    writer = opened()
    keys = namespace.keys([f"{i:064x}" for i in range(40)])
    assert all(writer.batch_set_from(keys, [tools.filled(key, 100) for key in keys]))
    writer._opened.client.delete(keys[:20])
    reader = opened(endpoint=proxy.url)
    proxy.fault = lambda method, path: faulty.Fault(flip=7) if method == "GET" else None
    assert reader.batch_exists(keys) == [False] * 40  # the first wave is absent, and no record counts
    reader = opened(absent_wave=40)
    reader._opened.client.read_small = faulty_reader(reader._opened.client.read_small)
    assert reader.batch_exists(keys) == [False] * 20 + [True] * 20


def faulty_reader(real):
    """Flips a byte of whatever small object is read."""

    def read(key):
        found = real(key)
        return found and (bytes([found[0][0] ^ 1]) + found[0][1:], found[1])

    return read


@pytest.mark.parametrize("fault", [faulty.Fault(hole=True), faulty.Fault(delay=2)], ids=["hole", "slow"])
def test_lookups_and_writes_end_in_time_too(stored, proxy, namespace, tools, fault):
    storage, keys, _pages = stored
    new = namespace.keys([f"new-{i}" for i in range(20)])
    proxy.fault = everything(fault)
    with pytest.raises(DeadlineError):
        on_time(lambda: storage.batch_exists(new))
    mine = [tools.filled(key, 1000) for key in new]
    assert on_time(lambda: storage.batch_set_from(new, mine)) == [Status.TIMED_OUT] * 20
    with pytest.raises(StorageError):
        on_time(lambda: storage.get(keys[0]))


def test_a_write_that_is_late_stores_the_page_it_was_given(stored, proxy, namespace, opened, tools):
    """The caller fills its memory anew after the deadline: the object must be the old page or nothing."""
    storage, *_ = stored
    key = namespace.key("late")
    page = tools.filled(key, NBYTES)
    wanted = tools.bytes_of(page)
    proxy.fault = lambda method, path: faulty.Fault(delay=1.0) if method == "PUT" else None
    assert on_time(lambda: storage.batch_set_from([key], [page])) == [Status.TIMED_OUT]
    page[0].view[:] = b"?" * NBYTES
    storage.close()
    assert opened().get(key) in (None, wanted)


def puts(fault):
    return lambda method, _: fault if method == "PUT" else None


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (faulty.Fault(takes=100_000), Status.FAILED),
        (faulty.Fault(takes=100_000, hole=True), Status.TIMED_OUT),
        (faulty.Fault(takes=100_000, status=503, code="SlowDown"), Status.FAILED),
        (faulty.Fault(takes=0, status=507, code="XMinioStorageFull"), Status.FAILED),
        (faulty.Fault(status=409, code="ConditionalRequestConflict"), Status.FAILED),
        (faulty.Fault(status=403, code="AccessDenied"), Status.FAILED),
    ],
)
def test_an_upload_that_the_store_does_not_take_whole_ends_in_time(
    stored, proxy, opened, namespace, tools, fault, status
):
    """More than fits into the sockets on the way, so that the store's end is met while sending."""
    storage, *_ = stored
    key = namespace.key("large")
    page = tools.filled(key, 64, 12_000_000)
    proxy.fault = puts(fault)
    assert on_time(lambda: storage.batch_set_from([key], [page])) == [status]
    page[1].view[:] = b"?" * 12_000_000
    proxy.fault = None
    proxy.released.set()
    storage.close()
    assert not opened().exists(key)


def test_a_page_that_is_there_need_not_be_sent_to_the_end(opened, proxy, namespace, tools):
    """Stores that refuse before they have read the body save the rest of it."""
    storage = opened(endpoint=proxy.url)
    key = namespace.key("there")
    proxy.fault = puts(faulty.Fault(takes=0, status=412, code="PreconditionFailed"))
    assert on_time(lambda: storage.batch_set_from([key], [tools.filled(key, 12_000_000)])) == [Status.OK]


def test_an_upload_that_breaks_off_once_is_sent_again(stored, proxy, opened, namespace, tools):
    storage, *_ = stored
    key = namespace.key("large")
    page = tools.filled(key, 64, 2_000_000)
    faults = [faulty.Fault(takes=100_000)]
    proxy.fault = lambda method, _: faults.pop() if method == "PUT" and faults else None
    with deadline(10):
        assert storage.batch_set_from([key], [page]) == [Status.OK]
    assert not faults
    assert opened().get(key) == tools.bytes_of(page)


def test_presigned_uploads_that_stop_working_are_given_up_page_by_page(
    opened, proxy, namespace, tools, caplog
):
    storage = opened(endpoint=proxy.url)
    keys = namespace.keys([f"page-{i}" for i in range(3)])
    pages = [tools.filled(key, *SIZES) for key in keys]
    proxy.fault = lambda method, path: (
        faulty.Fault(status=403) if method == "PUT" and "X-Amz-Sig" in path else None
    )
    with deadline(10):
        assert all(storage.batch_set_from(keys, pages))
    assert caplog.text.count("presigned") == 1
    assert [opened().get(key) for key in keys] == list(map(tools.bytes_of, pages))


def test_a_store_that_refuses_connections_is_unavailable(stored, proxy, tools):
    storage, keys, _ = stored
    proxy.close()
    assert on_time(lambda: storage.batch_get_into(keys, [tools.empty(*SIZES) for _ in keys])) == (
        [Status.FAILED] * 4
    )
    with pytest.raises(StorageError):
        on_time(lambda: storage.batch_exists(keys[:1]))
