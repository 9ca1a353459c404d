"""Pages in a real store: whole or missing, shared, cleared by namespace, never called when closed."""

import threading
import time
from dataclasses import replace

import pytest

from hicache_storage import BufferMismatchError, ClosedError, Status
from hicache_storage.deadline import deadline
from hicache_storage.layers.layer import find_layer
from hicache_storage_mooncake import MooncakeStorage

pytestmark = pytest.mark.wheel

SIZES = (1000, 64_000, 64_000)


def names(prefix, count):
    return [f"{prefix}-{i}" for i in range(count)]


def stored(storage, namespace, memory, prefix, count=4, sizes=SIZES):
    keys = namespace.keys(names(prefix, count))
    pages = [memory.filled(key, *sizes) for key in keys]
    assert all(storage.batch_set_from(keys, pages))
    return keys, pages


@pytest.fixture
def storage(shared_cluster, memory):
    with shared_cluster.open() as storage:
        storage.register_buffer(memory.whole)
        yield storage
        storage.clear()


def test_pages_go_there_and_back_between_scattered_buffers(storage, memory, tools):
    keys, _ = stored(storage, tools.NAMESPACE, memory, "round", 8)
    pages = [memory.page(100_000, 29_000) for _ in keys]
    assert storage.batch_get_into(keys, pages) == [Status.OK] * 8
    assert [tools.bytes_of(page) for page in pages] == [tools.content_of(key, 129_000) for key in keys]
    assert storage.batch_exists([*keys, "no/such"]) == [True] * 8 + [False]
    assert storage.get(keys[0]) == tools.content_of(keys[0], 129_000)
    assert storage.get("no/such") is None


def test_an_object_of_another_size_is_corrupt_and_costs_no_other_page(storage, memory, tools):
    keys, _ = stored(storage, tools.NAMESPACE, memory, "size", 5)
    nbytes = sum(SIZES)
    pages = [memory.page(nbytes + extra) for extra in (0, 1, -1, 50_000, 0)]
    found = storage.batch_get_into(keys, pages)
    assert found == [Status.OK, Status.CORRUPT, Status.CORRUPT, Status.CORRUPT, Status.OK]


def test_a_key_twice_in_a_batch_fills_both_pages(storage, memory, tools):
    keys, _ = stored(storage, tools.NAMESPACE, memory, "twin", 2)
    pages = [memory.page(sum(SIZES)) for _ in range(4)]
    order = [keys[0], keys[1], keys[0], keys[0]]
    assert storage.batch_get_into(order, pages) == [Status.OK] * 4
    assert [tools.bytes_of(page) for page in pages] == [tools.content_of(key, sum(SIZES)) for key in order]


def test_very_scattered_batches_do_not_overflow_mooncakes_queue(storage, memory, tools):
    sizes = (512,) * 80
    keys, pages = stored(storage, tools.NAMESPACE, memory, "scattered", 128, sizes)
    for page in pages:
        for buffer in page:
            buffer.view[:] = bytes(buffer.nbytes)
    assert all(storage.batch_get_into(keys, pages))
    assert [tools.bytes_of(page) for page in pages] == [tools.content_of(key, 40_960) for key in keys]


def test_memory_that_was_not_registered_is_refused(storage, tools):
    strange = tools.Memory(1 << 20)
    for call in (storage.batch_get_into, storage.batch_set_from):
        with pytest.raises(BufferMismatchError):
            call(["some/key"], [strange.page(100)])


def test_two_processes_share_pages(storage, shared_cluster, memory, tools):
    keys, _ = stored(storage, tools.NAMESPACE, memory, "shared", 4)
    script = """
import hashlib, json, sys
from hicache_storage import Namespace
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
with MooncakeStorage(MooncakeSettings(**json.loads(sys.argv[1])), Namespace()) as storage:
    for key in sys.argv[2:]:
        print(hashlib.sha256(storage.get(key)).hexdigest())
    storage.set(sys.argv[2] + "-answer", memoryview(b"from there"))
"""
    import hashlib

    said = shared_cluster.elsewhere(script, *keys).stdout.split()
    assert said == [hashlib.sha256(tools.content_of(key, sum(SIZES))).hexdigest() for key in keys]
    assert storage.get(keys[0] + "-answer") == b"from there"


def test_clear_removes_leased_pages_and_leaves_other_namespaces_alone(storage, shared_cluster, memory, tools):
    keys, _ = stored(storage, tools.NAMESPACE, memory, "cleared", 6)
    neighbour = replace(tools.NAMESPACE, tenant="neighbour")
    theirs, _ = stored(storage, neighbour, memory, "kept", 3)
    with shared_cluster.open(replace(tools.NAMESPACE, epoch=9)) as bystander:
        bystander.clear()
    assert all(storage.batch_exists(keys))  # which leases them
    storage.clear()
    assert not any(storage.batch_exists(keys))
    assert all(storage.batch_exists(theirs))
    storage.delete(theirs)
    assert not any(storage.batch_exists(theirs))


def test_a_deleted_page_is_stored_anew(storage, memory, tools):
    keys, pages = stored(storage, tools.NAMESPACE, memory, "healed", 1)
    pages[0][0].view[:] = b"\xee" * SIZES[0]
    assert storage.batch_set_from(keys, pages)[0]
    assert storage.get(keys[0]) == tools.content_of(keys[0], sum(SIZES))  # present keys are left as they are
    storage.delete(keys)
    assert storage.batch_set_from(keys, pages)[0]
    assert storage.get(keys[0]) == tools.bytes_of(pages[0])


def test_eight_threads_race_with_close(shared_cluster, tools):
    for _ in range(5):
        memory = tools.Memory(8 << 20)
        storage = shared_cluster.open()
        storage.register_buffer(memory.whole)
        page, key = memory.filled("race", 65_536), tools.NAMESPACE.key("race")
        running = threading.Barrier(9)
        outcomes = []

        def hammer(storage=storage, page=page, key=key, running=running, outcomes=outcomes):
            calls = (
                lambda: storage.batch_set_from([key], [page]),
                lambda: storage.batch_exists([key]),
                lambda: storage.batch_get_into([key], [page]),
                lambda: storage.get(key),
                storage.describe,
            )
            running.wait(10)
            try:
                while True:
                    for call in calls:
                        call()
            except ClosedError:
                outcomes.append("closed")
            except Exception as error:
                outcomes.append(repr(error))

        threads = [threading.Thread(target=hammer) for _ in range(8)]
        for thread in threads:
            thread.start()
        running.wait(10)
        storage.close()
        for thread in threads:
            thread.join(10)
        assert outcomes == ["closed"] * 8
        storage.unregister_buffer(memory.whole)
        storage.close()


FORKS = """
import json, os, sys
from hicache_storage import ClosedError, Namespace, UnsupportedError
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
settings = MooncakeSettings(**{**json.loads(sys.argv[1]), "global_segment_size": "16mb"})
storage = MooncakeStorage(settings, Namespace())
if child := os.fork():
    status = os.waitpid(child, 0)[1]
    print("child ended with", status, "and the parent answers", storage.exists("a/b"), flush=True)
    sys.exit()
for call in (lambda: storage.exists("a/b"), storage.close, lambda: MooncakeStorage(settings, Namespace())):
    try:
        call()
    except (ClosedError, UnsupportedError) as error:
        print(type(error).__name__)
"""


def test_a_forked_child_is_refused_and_ends_in_peace(shared_cluster):
    done = shared_cluster.elsewhere(FORKS)
    assert done.stdout.splitlines() == [
        "ClosedError",
        "UnsupportedError",
        "child ended with 0 and the parent answers False",
    ]
    assert "stuck" not in done.stderr


def test_through_all_layers_the_plugin_is_found_and_described(shared_cluster, memory, tools):
    with shared_cluster.stack() as stack:
        stack.register_buffer(memory.whole)
        pages = [memory.filled(f"layered-{i}", 300_000) for i in range(40)]
        assert all(stack.batch_set_from(names("layered", 40), pages))
        back = [memory.page(300_000) for _ in range(40)]
        assert all(stack.batch_get_into(names("layered", 40), back))
        assert [tools.bytes_of(page) for page in back] == [tools.bytes_of(page) for page in pages]
        facts = stack.describe()
        assert facts["breaker"] == "reads on, writes on"
        assert int(facts["master's capacity"]) == 256 << 20
        assert int(facts["master's keys"]) >= 40
        plugin = find_layer(stack, MooncakeStorage)
        assert plugin.capabilities.persistent
        stack.clear()


def test_an_embedded_segment_serves_others_and_goes_with_its_process(cluster, memory, tools):
    storage = cluster.open(global_segment_size="32mb")
    storage.register_buffer(memory.whole)
    keys, _ = stored(storage, tools.NAMESPACE, memory, "embedded", 4)
    assert not storage.capabilities.persistent
    other = cluster.open()
    assert other.get(keys[0]) == tools.content_of(keys[0], sum(SIZES))


def test_a_full_store_evicts_or_refuses_and_goes_on_reading(cluster, memory, tools):
    cluster.add_owner(32)
    storage = cluster.open(full_seconds=0.5)
    storage.register_buffer(memory.whole)
    page = [memory.filled("full", 2 << 20)]
    keys = tools.NAMESPACE.keys(names("full", 40))
    statuses = [storage.batch_set_from([key], page)[0] for key in keys]
    assert set(statuses) <= {Status.OK, Status.FAILED}
    assert statuses.count(Status.OK) > 16  # more than fits: older ones were evicted
    newest = [key for key, status in zip(keys, statuses, strict=True) if status][-1]
    assert storage.get(newest) == tools.content_of("full", 2 << 20)
    huge = [memory.page(24 << 20)]
    assert storage.batch_set_from(tools.NAMESPACE.keys(["a"]), huge)[0] in (Status.OK, Status.FAILED)


def test_a_store_that_stays_full_refuses_within_the_deadline_and_then_at_once(cluster, memory, tools):
    cluster.add_owner(32)
    storage = cluster.open(hard_pin=True, full_seconds=30.0)
    storage.register_buffer(memory.whole)
    page = [memory.filled("pinned", 4 << 20)]
    keys = tools.NAMESPACE.keys(names("pinned", 12))

    def put(key, seconds):
        started = time.monotonic()
        with deadline(seconds):
            return storage.batch_set_from([key], page)[0], time.monotonic() - started

    statuses = [put(key, 0.4) for key in keys]
    refused = [took for status, took in statuses if status is Status.FAILED]
    assert len(refused) > 2
    assert 0.1 < refused[0] < 0.7  # eviction, which might make room, is waited for, for half of the time
    assert max(refused[1:]) < 0.2
    stored = [key for key, (status, _) in zip(keys, statuses, strict=True) if status]
    assert storage.batch_get_into(stored[:1], page) == [Status.OK]


def test_the_segment_is_shared_out_among_the_ranks(cluster, tools):
    ranked = replace(tools.NAMESPACE, ranks=(("tp", 1, 2),))
    storage = cluster.open(ranked, global_segment_size="64mb")
    assert storage.describe()["segment"] == f"{32 << 20} bytes in this process"
