"""Loads under way: layer N + 1 is copied to L1 while layer N is computed with.

Who computes calls ``wait_layer`` before it reads a layer, as SGLang's attention does with its
LayerDoneCounter; who owns the slots calls ``wait`` before any of them, in L1 or L2, is given away.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch


class Loading(Protocol):
    """Pages on their way from L2 to L1."""

    def wait_layer(self, layer: int) -> None:
        """Let what follows find ``layer`` in L1.

        On a CPU what follows in this thread, on CUDA in its current stream. Raises what the copy
        raised. Any thread.
        """

    def wait(self) -> float:
        """Return when all of it is in L1 and nothing touches either tier any more; its seconds.

        Raises what the copy raised; the pages in L1 are worth nothing then. Any thread.
        """


class HostLoading:
    """Layers that another thread copies, and a counter of those that are done."""

    def __init__(self, steps: Iterator[range]) -> None:
        self._steps = steps
        self._layers = threading.Condition()
        self._loaded = 0
        self._ended = False
        self._error: BaseException | None = None
        self._seconds = 0.0

    def run(self) -> None:
        """Copy, a layer after the other. Raises nothing: it is told to those who wait."""
        began = time.perf_counter()
        error: BaseException | None = None
        try:
            for layers in self._steps:
                with self._layers:
                    self._loaded = layers.stop
                    self._layers.notify_all()
        except BaseException as raised:
            error = raised
        with self._layers:
            self._seconds = time.perf_counter() - began
            self._error = error
            self._ended = True
            self._layers.notify_all()

    def wait_layer(self, layer: int) -> None:
        with self._layers:
            self._layers.wait_for(lambda: self._loaded > layer or self._ended)
            if self._error is not None:
                raise self._error

    def wait(self) -> float:
        with self._layers:
            self._layers.wait_for(lambda: self._ended)
            if self._error is not None:
                raise self._error
            return self._seconds


class CudaLoading:
    """Layers that a stream copies, and an event after each step of it."""

    def __init__(self, steps: Iterable[range], stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._began = _timed_event(stream)
        self._events: list[torch.cuda.Event] = []
        for layers in steps:
            event = _timed_event(stream)
            self._events += [event] * len(layers)

    def wait_layer(self, layer: int) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._events[layer])

    def wait(self) -> float:
        self._events[-1].synchronize()
        return float(self._began.elapsed_time(self._events[-1])) / 1e3


class Loadings:
    """Several loads of one request, seen as one."""

    def __init__(self, parts: Sequence[Loading]) -> None:
        self._parts = parts

    def wait_layer(self, layer: int) -> None:
        for part in self._parts:
            part.wait_layer(layer)

    def wait(self) -> float:
        """As Loading; the seconds of the parts one after the other, which is how they are copied."""
        return sum([part.wait() for part in self._parts])


LOADED: Loading = Loadings(())
"""Nothing is on its way."""


def _timed_event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event
