"""The Mooncake backend next to Mooncake's own calls on the same buffers.

    python benchmarks/mooncake_backend.py --json OUT.json

Everything is measured in one run, in interleaved rounds, and reported as medians and as ratios to
the raw calls of this run. Each contestant has keys of its own, which are removed after each round.
"bare" is the plugin alone, where the bars are; "layers" is what open_storage gives, with its deadline
(a copy through memory of the SDK's own) and its checksums. Over TCP the store is another process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from socket import socket

from rich.console import Console
from rich.table import Table

from hicache_storage import Buffer, Namespace, Page, open_storage
from hicache_storage.deadline import deadline
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage, library
from hicache_storage_mooncake.client import close_idle
from hicache_storage_mooncake.processes import start_master, start_owner

NAMESPACE = Namespace(model="benchmark", dtype="bfloat16", page_size=64)
BARS = {"embedded": 0.90, "tcp": 0.95}
DEADLINE_SECONDS = 0.5
LATE_SECONDS = 0.1


@dataclass(frozen=True)
class Line:
    """One measured figure and the bar it is held to."""

    name: str
    value: float
    unit: str
    bar: str = ""
    passed: bool | None = None


def timed(
    contestants: dict[str, tuple[Callable[[], None], Callable[[], None]]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of each contestant's first function, round by round; its second one clears up, untimed."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(-1, rounds):  # round -1 warms up
        random.shuffle(order)
        for name in order:
            work, after = contestants[name]
            started = time.perf_counter()
            work()
            took = time.perf_counter() - started
            after()
            if number >= 0:
                seconds[name].append(took)
    return seconds


def measure(
    table: dict[str, object], pages: Sequence[Page], whole: Buffer, rounds: int, mode: str
) -> list[Line]:
    """Raw calls, the bare plugin and the plugin behind its layers against one store."""
    bare = MooncakeStorage(MooncakeSettings.model_validate(table), NAMESPACE)
    layers = open_storage("mooncake", {**table, "get_seconds": 60, "set_seconds": 60}, NAMESPACE)
    bare.register_buffer(whole)
    layers.register_buffer(whole)
    raw = bare._client.store  # the very client that the plugin uses
    addresses = [[buffer.address for buffer in page] for page in pages]
    sizes = [[buffer.nbytes for buffer in page] for page in pages]
    nbytes = sum(map(sum, sizes))
    keys = {name: NAMESPACE.keys([f"{name}-{i}" for i in range(len(pages))]) for name in ("raw", "bare")}
    names = [f"layers-{i}" for i in range(len(pages))]

    def removed(which: Sequence[str]) -> None:
        raw.batch_remove(list(which), True)

    def sure(done: Sequence[object]) -> None:
        assert all(done), "a page was not moved"

    puts = {
        "raw": (
            lambda: sure(
                [code == 0 for code in raw.batch_put_from_multi_buffers(keys["raw"], addresses, sizes)]
            ),
            lambda: removed(keys["raw"]),
        ),
        "bare": (lambda: sure(bare.batch_set_from(keys["bare"], pages)), lambda: removed(keys["bare"])),
        "layers": (
            lambda: sure(layers.batch_set_from(names, pages)),
            lambda: removed(NAMESPACE.keys(names)),
        ),
    }
    put = timed(puts, rounds)
    took: dict[str, list[float]] = {name: [] for name in puts}
    readers: dict[str, Callable[[], None]] = {
        "raw": lambda: sure(
            [code > 0 for code in raw.batch_get_into_multi_buffers(keys["raw"], addresses, sizes)]
        ),
        "bare": lambda: sure(bare.batch_get_into(keys["bare"], pages)),
        "layers": lambda: sure(layers.batch_get_into(names, pages)),
    }
    for _ in range(rounds + 1):
        for name in random.sample(list(readers), len(readers)):
            puts[name][0]()  # the store holds one batch at a time
            started = time.perf_counter()
            readers[name]()
            took[name].append(time.perf_counter() - started)
            puts[name][1]()
    gets = {name: times[1:] for name, times in took.items()}
    layers.close()
    bare.close()
    lines = []
    for what, found in (("set", put), ("get", gets)):
        raw_seconds = statistics.median(found["raw"])
        lines.append(Line(f"{mode} {what} raw", nbytes / raw_seconds / 1e9, "GB/s"))
        for name in ("bare", "layers"):
            # of one round, as the machine's speed changes between rounds
            ratio = statistics.median(r / o for r, o in zip(found["raw"], found[name], strict=True))
            held = name == "bare"
            bar, passed = (f">= {BARS[mode]}", ratio >= BARS[mode]) if held else ("", None)
            lines.append(Line(f"{mode} {what} {name}", ratio, "of raw", bar, passed))
    return lines


def measure_hang(
    table: dict[str, object], pause: Callable[[], None], resume: Callable[[], None]
) -> list[Line]:
    """A stopped master: the longest call beyond its deadline, and the longest pause of a Python thread."""
    limits = {
        "exists_seconds": DEADLINE_SECONDS,
        "get_seconds": DEADLINE_SECONDS,
        "set_seconds": DEADLINE_SECONDS,
    }
    memory = Buffer.of(mmap.mmap(-1, 8 << 20))
    pages = [(memory.slice(i << 20, 1 << 20),) for i in range(8)]
    names = [f"hang-{i}" for i in range(8)]
    longest, gap, ended = 0.0, [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not ended.wait(0.002):
            now = time.monotonic()
            gap[0], last = max(gap[0], now - last), now

    with open_storage("mooncake", {**table, **limits}, NAMESPACE) as storage:
        storage.register_buffer(memory)
        assert all(storage.batch_set_from(names, pages))
        watcher = threading.Thread(target=tick)
        watcher.start()
        pause()
        calls = (
            lambda: storage.batch_get_into(names, pages),
            lambda: storage.batch_exists(names),
            lambda: storage.batch_set_from(names, pages),
        )
        for number in range(30):
            started = time.monotonic()
            assert not any(calls[number % 3]())
            longest = max(longest, time.monotonic() - started)
        ended.set()
        watcher.join()
        resume()
    late = max(0.0, longest - DEADLINE_SECONDS)
    return [
        Line("hung master, beyond the deadline", late * 1e3, "ms", "<= 100", late <= LATE_SECONDS),
        Line("hung master, longest pause of a thread", gap[0] * 1e3, "ms", "<= 100", gap[0] <= LATE_SECONDS),
    ]


def machine() -> dict[str, str]:
    """What the figures depend on."""
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return {
        "cpu": f"{os.cpu_count()} x {models[0] if models else platform.processor()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "mooncake": ", ".join(f"{name} {version}" for name, version in library.wheels().items()),
        "sglang": "importable" if find_spec("sglang") else "not installed: sglang:mooncake was not run",
    }


def free_port() -> int:
    with socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> int:
    """Exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-mib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    half = options.page_mib << 19
    whole = Buffer.of(mmap.mmap(-1, 2 * half * options.pages))
    ctypes.memset(whole.address, 0x5A, whole.nbytes)
    pages = [
        (whole.slice(2 * i * half, half), whole.slice((2 * i + 1) * half, half)) for i in range(options.pages)
    ]
    segment = whole.nbytes * 3 // 2
    lines: list[Line] = []
    with deadline(None), start_master(free_port(), free_port()) as master:
        table: dict[str, object] = {"master_server_address": master.address, "protocol": "tcp"}
        lines += measure({**table, "global_segment_size": segment}, pages, whole, options.rounds, "embedded")
        close_idle()
        with start_owner(master.address, segment):
            pure = {**table, "global_segment_size": 0}
            lines += measure(pure, pages, whole, options.rounds, "tcp")
            lines += measure_hang(pure, master.pause, master.resume)
            close_idle()
    shown = Table("figure", "value", "bar", "")
    for line in lines:
        verdict = "" if line.passed is None else "pass" if line.passed else "FAIL"
        shown.add_row(line.name, f"{line.value:.2f} {line.unit}", line.bar, verdict)
    console = Console()
    console.print(shown)
    console.print(json.dumps(machine(), indent=1))
    if options.json:
        found = {
            "machine": machine(),
            "options": {k: str(v) for k, v in vars(options).items() if k != "json"},
        }
        options.json.write_text(
            json.dumps({**found, "lines": [asdict(line) for line in lines]}, indent=1) + "\n"
        )
    return any(line.passed is False for line in lines)


if __name__ == "__main__":
    sys.exit(main())
