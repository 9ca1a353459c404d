"""What was done to a backend in one case, in order: the first thing the reader of a failure needs."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from hicache_storage import Buffer, HiCacheStorage, Page, ReadableBuffer, Status
from hicache_storage.layers.layer import Layer

T = TypeVar("T")

KEPT_EVENTS = 200


class History:
    """The last events of a case, with the milliseconds since its start. Thread-safe."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._events: deque[str] = deque(maxlen=KEPT_EVENTS)
        self._lock = threading.Lock()
        self._dropped = 0

    def note(self, event: str) -> None:
        """Add an event."""
        with self._lock:
            self._dropped += len(self._events) == KEPT_EVENTS
            self._events.append(f"{(time.monotonic() - self._start) * 1e3:9.1f} ms  {event}")

    def lines(self) -> list[str]:
        """The events, oldest first; says so when older ones were dropped."""
        with self._lock:
            dropped = [f"({self._dropped} earlier events)"] if self._dropped else []
            return [*dropped, *self._events]


class Client(Layer):
    """A storage as a case uses it: passes every call on as it is and writes it down.

    ``backend`` is the author's own instance, below whatever layers ``inner`` has. ``named`` says
    that a naming layer takes page names; otherwise keys are object keys.
    """

    def __init__(
        self, inner: HiCacheStorage, backend: HiCacheStorage, history: History, name: str, *, named: bool
    ) -> None:
        super().__init__(inner)
        self.backend = backend
        self._history = history
        self._name = name
        self._named = named

    def keys(self, names: Sequence[str]) -> list[str]:
        """What this client's methods call the pages of these names."""
        return list(names) if self._named else self.namespace.keys(names)

    def get(self, key: str) -> ReadableBuffer | None:
        return self._call(f"get({_key(key)})", lambda: self.inner.get(key))

    def exists(self, key: str) -> bool:
        return self._call(f"exists({_key(key)})", lambda: self.inner.exists(key))

    def set(self, key: str, value: memoryview) -> None:
        self._call(f"set({_key(key)}, {value.nbytes} B)", lambda: self.inner.set(key, value))

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._call(f"batch_exists({_keys(keys)})", lambda: self.inner.batch_exists(keys))

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        what = f"batch_get_into({_keys(keys)}, {_pages(pages)})"
        return self._call(what, lambda: self.inner.batch_get_into(keys, pages))

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        what = f"batch_set_from({_keys(keys)}, {_pages(pages)})"
        return self._call(what, lambda: self.inner.batch_set_from(keys, pages))

    def register_buffer(self, buffer: Buffer) -> None:
        self._call(f"register_buffer({buffer.nbytes} B)", lambda: self.inner.register_buffer(buffer))

    def unregister_buffer(self, buffer: Buffer) -> None:
        self._call(f"unregister_buffer({buffer.nbytes} B)", lambda: self.inner.unregister_buffer(buffer))

    def delete(self, keys: Sequence[str]) -> None:
        self._call(f"delete({_keys(keys)})", lambda: self.inner.delete(keys))

    def clear(self) -> None:
        self._call("clear()", self.inner.clear)

    def close(self) -> None:
        self._call("close()", self.inner.close)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            result = call()
        except BaseException as error:
            self._history.note(f"{self._name}.{what} raised {type(error).__name__}: {str(error)[:120]}")
            raise
        self._history.note(f"{self._name}.{what}{_result(result)}")
        return result


def _key(key: str) -> str:
    namespace, _, name = key.rpartition("/")
    shown = name if len(name) <= 24 else f"{name[:20]}..."
    return f"{namespace[:6]}/{shown}" if namespace else shown


def _keys(keys: Sequence[str]) -> str:
    if len(keys) <= 2:
        return f"[{', '.join(map(_key, keys))}]"
    return f"[{_key(keys[0])} ... {len(keys)} keys]"


def _pages(pages: Sequence[Page]) -> str:
    if not pages:
        return "[]"
    sizes = Counter(buffer.nbytes for buffer in pages[0])
    return " + ".join(f"{count} x {size} B" for size, count in sizes.items())


def _result(result: object) -> str:
    if result is None:
        return ""
    if isinstance(result, list):
        counted = Counter(item.name if isinstance(item, Status) else repr(item) for item in result)
        return " -> " + (", ".join(f"{count} {name}" for name, count in counted.items()) or "[]")
    if isinstance(result, (bytes, bytearray, memoryview)):
        return f" -> {len(result)} B"
    return f" -> {result!r}"
