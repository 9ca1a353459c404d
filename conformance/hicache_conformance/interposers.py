"""Faults between the backend and the SDK's layers, switched by the case while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hicache_storage import CapacityError, HiCacheStorage, Page, ReadableBuffer, Status, UnavailableError
from hicache_storage.layers.faults import FaultPlan, FaultsLayer
from hicache_storage.layers.layer import Layer

T = TypeVar("T")


def faulty(**rates: Any) -> Callable[[HiCacheStorage], FaultsLayer]:
    """Something to put above a backend: the SDK's faults with these fields of ``FaultPlan``."""
    return lambda storage: FaultsLayer(storage, FaultPlan.model_validate(rates))


class Outage(Layer):
    """The backend, with a switch: ``up``, ``down`` (errors at once) or ``hung`` (no answer at all).

    It says that it is not bounded: a hang here is one that no deadline reaches by itself.
    ``calls`` counts what got this far.
    """

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.capabilities = replace(inner.capabilities, bounded=False)
        self.calls = 0
        self.delay = 0.0
        self._error: Exception | None = None
        self._answers = threading.Event()
        self._answers.set()
        self._slowness = threading.Event()

    def up(self) -> None:
        """Answer again, calls that hang included."""
        self._error = None
        self._answers.set()

    def down(self, error: Exception | None = None) -> None:
        """Raise ``error`` (default UnavailableError) at every call."""
        self._error = error or UnavailableError("the store is down")
        self._answers.set()

    def hung(self) -> None:
        """Answer no call until ``up`` or ``down``."""
        self._answers.clear()

    def get(self, key: str) -> ReadableBuffer | None:
        return self._call(lambda: self.inner.get(key))

    def exists(self, key: str) -> bool:
        return self._call(lambda: self.inner.exists(key))

    def set(self, key: str, value: memoryview) -> None:
        self._call(lambda: self.inner.set(key, value))

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._call(lambda: self.inner.batch_exists(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._call(lambda: self.inner.batch_get_into(keys, pages))

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._call(lambda: self.inner.batch_set_from(keys, pages))

    def close(self) -> None:
        self.up()
        self.inner.close()

    def _call(self, call: Callable[[], T]) -> T:
        self.calls += 1
        self._answers.wait()
        if self.delay:
            self._slowness.wait(self.delay)
        if self._error is not None:
            raise self._error
        return call()


# ruff: noqa: ARG002 - below are layers that answer without looking


class FullStore(Layer):
    """Refuses every write as a full disk does; reads go on."""

    def set(self, key: str, value: memoryview) -> None:
        raise CapacityError(f"no room for {len(value)} bytes")

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        raise CapacityError(f"no room for {len(keys)} pages")


class Babbler(Layer):
    """Gives the answer that the case puts in, whatever was asked."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.answer: Any = None

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._say()  # type: ignore[no-any-return]

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._say()  # type: ignore[no-any-return]

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return self._say()  # type: ignore[no-any-return]

    def _say(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Liar(Layer):
    """Says that every key exists and fails to deliver any: metadata that outlived its data."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.reads = 0

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return [True] * len(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        self.reads += 1
        return [Status.MISSING] * len(keys)
