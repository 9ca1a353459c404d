"""open_storage finds a backend by name or class and puts every layer around it."""

import subprocess
import sys

import pytest

from hicache_conformance.pages import GuardedPages
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Namespace, SettingsError, Status, find_backend, open_storage
from hicache_storage.layers.breaker import BreakerLayer
from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.layers.faults import FaultsLayer
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage.layers.metrics import MetricsLayer
from hicache_storage.layers.naming import NamingLayer

REFERENCE = "hicache_conformance.reference:ReferenceStorage"


def stack(storage):
    while True:
        yield type(storage)
        if not hasattr(storage, "inner"):
            return
        storage = storage.inner


def test_the_layers_stand_in_order():
    with open_storage(REFERENCE, {"faults": {}}) as storage:
        assert list(stack(storage)) == [
            NamingLayer,
            MetricsLayer,
            BreakerLayer,
            DeadlineLayer,
            IntegrityLayer,
            FaultsLayer,
            ReferenceStorage,
        ]


def test_each_layer_can_be_switched_off():
    off = {"metrics": False, "breaker": False, "deadline": False, "integrity": False}
    with open_storage(REFERENCE, off) as storage:
        assert list(stack(storage)) == [NamingLayer, ReferenceStorage]


def test_keys_are_page_names_and_carry_the_completed_identity():
    with open_storage(REFERENCE, '{"tenant": "t", "epoch": 3}', Namespace(model="m")) as storage:
        storage.set("page", memoryview(b"bytes"))
        assert bytes(storage.get("page")) == b"bytes"
        inner = storage
        while hasattr(inner, "inner"):
            inner = inner.inner
        assert list(inner.store) == [Namespace(model="m", tenant="t", epoch=3).key("page")]


def test_an_identity_given_twice_must_agree():
    with pytest.raises(SettingsError, match="tenant is given twice"):
        open_storage(REFERENCE, {"tenant": "a"}, Namespace(tenant="b"))


def test_a_setting_that_the_backend_does_not_have_is_refused():
    with pytest.raises(SettingsError, match="unknown setting 'root'"):
        open_storage(REFERENCE, {"root": "/x"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fiel", "did you mean 'file'"),
        ("zzz", "installed are: .*file"),
        ("no_such_module:X", "cannot be imported"),
        ("hicache_conformance.reference:ReferenceStorag", "did you mean 'ReferenceStorage'"),
        ("hicache_storage.namespace:Namespace", "not a subclass"),
        ("hicache_storage:HiCacheStorage", "lacks exists, get, set"),
        ("a:", "module:Class"),
    ],
)
def test_a_name_that_names_no_backend_is_refused_with_what_would(name, says):
    with pytest.raises(SettingsError, match=says):
        find_backend(name)


def test_injected_faults_never_show_as_wrong_bytes():
    faults = {"seed": 1, "error_rate": 0.1, "page_error_rate": 0.1, "flip_rate": 0.3}
    settings = {"faults": faults, "breaker_failures": 1000, "negative_ttl": 0}
    memory = GuardedPages(8, [64, 64])
    keys = [f"p{i}" for i in range(8)]
    with open_storage(REFERENCE, settings) as storage:
        outcomes = set()
        for round_number in range(200):
            memory.fill(seed=7)
            written = [memory.content(i) for i in range(8)]
            storage.batch_set_from(keys, memory.pages)
            memory.blank()
            statuses = storage.batch_get_into(keys, memory.pages)
            outcomes.update(statuses)
            for i, status in enumerate(statuses):
                assert not status or memory.content(i) == written[i], f"round {round_number} page {i}"
    assert {Status.OK, Status.FAILED, Status.CORRUPT} <= outcomes


def test_a_hang_is_injected_within_the_deadline():
    with open_storage(
        REFERENCE, {"faults": {"hang_rate": 1}, "get_seconds": 0.05, "breaker_cooldown": 60}
    ) as storage:
        assert storage.batch_get_into(["a"], GuardedPages(1, [8]).pages) == [Status.TIMED_OUT]
        assert storage.batch_get_into(["a"], GuardedPages(1, [8]).pages) == [Status.FAILED]


def test_metrics_count_what_the_caller_saw():
    from prometheus_client import REGISTRY

    def pages(op, status):
        labels = {"backend": REFERENCE, "op": op, "status": status}
        return REGISTRY.get_sample_value("hicache_storage_pages_total", labels) or 0

    memory = GuardedPages(2, [100])
    before = pages("get", "ok"), pages("get", "missing"), pages("exists", "absent")
    with open_storage(REFERENCE) as storage:
        storage.batch_set_from(["a"], memory.pages[:1])
        storage.batch_get_into(["a", "b"], memory.pages)
        storage.batch_exists(["b"])
        moved = [(t.op, t.pages, t.nbytes) for t in storage.inner.take()]
        assert storage.inner.take() == []
    after = pages("get", "ok"), pages("get", "missing"), pages("exists", "absent")
    assert [a - b for a, b in zip(after, before, strict=True)] == [1, 1, 1]
    assert moved == [("set", 1, 100), ("get", 1, 100)]


def test_a_hundred_open_and_close_cycles_leave_nothing_behind(no_leaks):
    memory = GuardedPages(2, [100])
    for _ in range(100):
        with open_storage(REFERENCE) as storage:
            storage.batch_set_from(["a", "b"], memory.pages)
            assert all(storage.batch_get_into(["a", "b"], memory.pages))


def test_importing_the_sdk_loads_neither_torch_nor_sglang_nor_pydantic():
    heavy = ("torch", "sglang", "pydantic", "typer")
    code = f"import sys, hicache_storage; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_threads_that_are_the_first_to_count_something_do_not_disturb_each_other():
    """The query thread and the backup thread may make their first calls at the same moment."""
    code = """
import sys, threading
from hicache_storage.layers.metrics import instruments
sys.setswitchinterval(1e-6)
barrier, found = threading.Barrier(8), []
def first():
    barrier.wait()
    found.append(instruments())
threads = [threading.Thread(target=first) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8 and len(set(map(id, found))) == 1
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
