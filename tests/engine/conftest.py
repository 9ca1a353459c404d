"""A storage that tests can watch and disturb."""

import threading

import pytest

from hicache_storage import Capabilities, HiCacheStorage, Namespace


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


@pytest.fixture
def other():
    """A second storage."""
    return MemoryStorage()


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()
