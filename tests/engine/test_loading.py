"""Loads that overlap with what computes on their layers, and what must not happen meanwhile."""

import threading

import pytest
import torch

from hicache_storage.engine import KVShape, Oracle, Source, TierEngine
from hicache_storage.engine.layouts import PAGE_FIRST_DIRECT
from hicache_storage.engine.loading import HostLoading, Loadings
from hicache_storage.engine.pools import DevicePool, HostPool
from hicache_storage.engine.shard import Shard
from hicache_storage.engine.transfer import IO_BACKENDS, open_transfer

SHAPE = KVShape.mha(4, 2, 8)
PAGE = 4
CPU = torch.device("cpu")


class LayerGate:
    """Lets copies pass one layer after the other; ``reached`` tells that one waits before a layer."""

    def __init__(self, copy):
        self._copy = copy
        self.layers = [threading.Event() for _ in range(SHAPE.layers)]
        self.reached = [threading.Event() for _ in range(SHAPE.layers)]
        self.error = None

    def __call__(self, source, source_slots, target, target_slots, by_layer):
        if not by_layer:
            return self._copy(source, source_slots, target, target_slots, by_layer)
        return self._gated(self._copy(source, source_slots, target, target_slots, by_layer))

    def _gated(self, steps):
        for layer in range(SHAPE.layers):
            self.reached[layer].set()
            assert self.layers[layer].wait(30)
            if self.error is not None:
                raise self.error
            yield next(steps)

    def open(self):
        for layer in self.layers:
            layer.set()


class Watching(Oracle):
    """An oracle that reads the cached pages layer by layer, as a model does."""

    def __init__(self):
        super().__init__(Shard(SHAPE), PAGE, CPU)
        self.before_layer = lambda _layer, _work: None
        self.wrong = []

    def compute(self, pages, work):
        super().compute(pages, work)
        expected = torch.empty_like(pages[: work.cached])
        self.fill(expected, range(work.cached), work.hashes[: work.cached])
        for layer in range(SHAPE.layers):
            self.before_layer(layer, work)
            work.loading.wait_layer(layer)
            if not torch.equal(pages[work.slots[: work.cached], :, layer], expected[:, :, layer]):
                self.wrong.append(layer)


@pytest.fixture
def compute():
    return Watching()


@pytest.fixture(params=IO_BACKENDS)
def engine(request, compute):
    layout = "page_first" if request.param == "kernel" else "page_first_direct"
    with TierEngine(
        SHAPE, PAGE, l1_tokens=48, mem_layout=layout, io_backend=request.param, compute=compute
    ) as engine:
        yield engine


@pytest.fixture
def gate(engine):
    """Between L2 and L1 of the engine, whose L2 has the pages of TOKENS and whose L1 has not."""
    engine.prefill(TOKENS)
    engine.flush_l1()
    engine._tiers.transfer._copy = gate = LayerGate(engine._tiers.transfer._copy)
    yield gate
    gate.open()


TOKENS = list(range(6 * PAGE))


def run_in_thread(call):
    """``call`` in a thread; a list that gets its result or what it raised, and the thread."""
    results = []

    def run():
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return results, thread


def test_a_layer_is_computed_with_while_the_next_one_is_on_its_way(engine, gate, compute):
    seen = []

    def before_layer(layer, _work):
        gate.layers[layer].set()
        if layer:
            assert gate.reached[layer].is_set()
        seen.append(layer)

    compute.before_layer = before_layer
    report = engine.prefill(TOKENS)
    assert report.sources == (Source.L2,) * 6
    assert (seen, compute.wrong, report.wrong_bytes) == ([0, 1, 2, 3], [], 0)


def test_a_layer_that_is_not_there_yet_is_waited_for(engine, gate, compute):
    waits = threading.Event()
    compute.before_layer = lambda layer, _work: layer == 2 and waits.set()
    gate.layers[0].set()
    gate.layers[1].set()
    results, thread = run_in_thread(lambda: engine.prefill(TOKENS))
    assert waits.wait(10)
    thread.join(0.2)
    assert thread.is_alive()
    gate.open()
    thread.join(10)
    assert results[0].wrong_bytes == 0
    assert compute.wrong == []


def test_slots_are_kept_until_a_load_has_ended_even_when_the_request_fails(engine, gate, compute):
    def fail(_layer, _work):
        raise ZeroDivisionError

    compute.before_layer = fail
    free = (engine._tiers.l1.free_slots, engine._tiers.l2.free_slots)
    results, thread = run_in_thread(lambda: engine.prefill(TOKENS))
    assert gate.reached[0].wait(10)
    thread.join(0.2)
    assert thread.is_alive()  # the copy still reads L2 and writes L1
    assert engine._tiers.tree.evict(1) is None
    gate.open()
    thread.join(10)
    assert isinstance(results[0], ZeroDivisionError)
    compute.before_layer = lambda _layer, _work: None
    assert engine.prefill(TOKENS).sources == (Source.L1,) * 6  # what was loaded is right, so it is kept
    assert engine._tiers.l1.free_slots == free[0] - 6
    assert engine._tiers.l2.free_slots == free[1]


def test_a_copy_that_fails_fails_the_request_and_leaves_no_page_behind(engine, gate, compute):
    free = engine._tiers.l1.free_slots
    gate.error = OSError("the device is gone")
    gate.open()
    with pytest.raises(OSError, match="the device is gone"):
        engine.prefill(TOKENS + [7] * PAGE)
    assert engine._tiers.l1.free_slots == free
    gate.error = None
    report = engine.prefill(TOKENS)
    assert report.sources == (Source.L2,) * 6
    assert (report.wrong_bytes, compute.wrong) == (0, [])


def test_a_load_that_cannot_begin_fails_the_request_and_leaves_no_page_behind(engine, gate, monkeypatch):
    gate.open()
    free = engine._tiers.l1.free_slots

    def refuse(*_):
        raise OSError("no such device")

    with monkeypatch.context() as patched:
        patched.setattr(engine._tiers.transfer, "load", refuse)
        with pytest.raises(OSError, match="no such device"):
            engine.prefill(TOKENS)
    assert engine._tiers.l1.free_slots == free
    assert engine.prefill(TOKENS).sources == (Source.L2,) * 6


def test_a_store_that_fails_fails_the_request_and_leaves_no_page_behind(engine, monkeypatch):
    free = engine._tiers.l2.free_slots

    def refuse(*_):
        raise OSError("no such device")

    with monkeypatch.context() as patched:
        patched.setattr(engine._tiers.transfer, "store", refuse)
        with pytest.raises(OSError, match="no such device"):
            engine.prefill(TOKENS)
    assert engine._tiers.l2.free_slots == free
    assert engine.prefill(TOKENS).sources == (Source.L1,) * 6


def test_seconds_of_a_report_are_those_of_the_copies(engine, gate):
    gate.open()
    assert engine.prefill(TOKENS).seconds[Source.L2] > 0


def test_two_loads_of_a_request_are_one_to_those_who_wait():
    steps = [iter([range(1), range(1, 2)]), iter([range(2)])]
    parts = [HostLoading(part) for part in steps]
    loading = Loadings(parts)
    parts[0].run()
    results, thread = run_in_thread(lambda: loading.wait_layer(1))
    thread.join(0.1)
    assert thread.is_alive()
    parts[1].run()
    thread.join(10)
    assert results == [None]
    assert loading.wait() >= 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("io_backend", IO_BACKENDS)
def test_a_load_comes_after_what_still_reads_its_slots_on_the_device(io_backend):
    device = torch.device("cuda")
    l1 = DevicePool(SHAPE, PAGE, 6, device)
    l2 = HostPool(SHAPE, PAGE, 9, PAGE_FIRST_DIRECT, device)
    transfer = open_transfer(io_backend, l1, l2)
    transfer.load([0], [0]).wait()  # whatever is made at first use is made
    l1.pages.fill_(7)
    l2.pages.fill_(8)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    read = l1.pages[:3].clone()
    loading = transfer.load([0, 1, 2], [0, 1, 2])
    loading.wait_layer(SHAPE.layers - 1)
    after = l1.pages[:3].clone()
    torch.cuda.synchronize()
    assert bool((read == 7).all())
    assert bool((after == 8).all())
    transfer.close()
    l2.close()
