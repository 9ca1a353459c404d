"""A storage that tests can watch and disturb, and engines on several ranks."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from hicache_storage import Capabilities, HiCacheStorage, Namespace
from hicache_storage.engine import KVShape, TierEngine
from hicache_storage.engine.ranks import GlooRanks, Place


class MemoryStorage(HiCacheStorage):
    """Pages in a dict; ``before`` maps a method's name to what is called with the key first."""

    capabilities = Capabilities(delete=True)

    def __init__(self):
        super().__init__(None, Namespace())
        self.pages = {}
        self.before = {}
        self.registered = []

    def get(self, key):
        self._disturb("get", key)
        return self.pages.get(key)

    def exists(self, key):
        self._disturb("exists", key)
        return key in self.pages

    def set(self, key, value):
        self._disturb("set", key)
        self.pages[key] = bytes(value)

    def register_buffer(self, buffer):
        self.registered.append(buffer)

    def unregister_buffer(self, buffer):
        self.registered.remove(buffer)

    def _disturb(self, method, key):
        if method in self.before:
            self.before[method](key)


class Gate:
    """Holds whoever calls it until it is opened; tells when somebody has come."""

    def __init__(self):
        self.reached = threading.Event()
        self.opened = threading.Event()

    def __call__(self, _key):
        self.reached.set()
        assert self.opened.wait(30)


@pytest.fixture
def storage():
    return MemoryStorage()


@pytest.fixture(scope="session")
def new_storage():
    """Makes a storage for each example of a property."""
    return MemoryStorage


@pytest.fixture
def other():
    """A second storage."""
    return MemoryStorage()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


class Team:
    """Ranks as threads of this process, over gloo; what ``each`` is given runs on all at once."""

    def __init__(self, ranks, engines, storages, threads):
        self.ranks, self.engines, self.storages = ranks, engines, storages
        self._threads = threads

    def each(self, call):
        """What ``call(engine)`` returned on each rank, or the first rank's error."""
        futures = [self._threads.submit(call, engine) for engine in self.engines]
        return [future.result(100) for future in futures]

    def errors(self, call):
        """What ``call(engine)`` raised on each rank, None where it did not."""
        futures = [self._threads.submit(call, engine) for engine in self.engines]
        return [future.exception(100) for future in futures]

    def prefill(self, tokens):
        """Where the pages came from, by rank; all have the same prefix, and no byte is wrong."""
        reports = self.each(lambda engine: engine.prefill(tokens))
        assert {report.wrong_bytes for report in reports} == {0}
        assert len({report.hit_tokens for report in reports}) == 1, [report.sources for report in reports]
        return [[source.value for source in report.sources] for report in reports]

    def hits(self, tokens):
        """How many leading pages no rank had to compute."""
        return {len(sources) - sources.count("recomputed") for sources in self.prefill(tokens)}

    def forget(self):
        """Leave what was stored in L3, and nothing anywhere else."""
        assert all(self.each(lambda engine: engine.wait_for_backup(60)))
        self.each(lambda engine: (engine.flush_l1(), engine.flush_l2()))


@pytest.fixture
def open_team(tmp_path, monkeypatch):
    """Opens engines on tp x pp ranks; ``storages``: one for all, or one each."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    names = itertools.count()
    with ExitStack() as stack:

        def open_team(shape, storages=None, *, tp=1, pp=1, timeout=60.0, side_pools=(), **options):
            size = tp * pp
            storages = storages or [MemoryStorage() for _ in range(size)]
            meeting = f"file://{tmp_path}/meeting-{next(names)}"
            threads = stack.enter_context(ThreadPoolExecutor(size))
            options = {"prefetch_policy": "wait_complete", "prefetch_threshold": 4, **options}

            def open_rank(rank):
                ranks = GlooRanks(Place.of(rank, tp, pp), meeting, timeout)
                stack.callback(ranks.close)
                engine = TierEngine(
                    KVShape.parse(shape),
                    4,
                    storage=storages[rank],
                    ranks=ranks,
                    side_pools=side_pools,
                    **{"l1_tokens": 48, **options},
                )
                return ranks, engine

            opened = [future.result(100) for future in [threads.submit(open_rank, r) for r in range(size)]]
            team = Team([ranks for ranks, _ in opened], [engine for _, engine in opened], storages, threads)
            stack.callback(lambda: team.each(lambda engine: engine.close()))
            return team

        yield open_team
