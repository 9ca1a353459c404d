"""The Mooncake backend next to Mooncake's own calls, and to SGLang's own MooncakeStore, on the same buffers.

    .venv-sglang-0.5.23/bin/python benchmarks/mooncake_backend.py --json OUT.json

Everything is measured in one run, in interleaved rounds, and reported as medians and as ratios
within a round. Each contestant has keys of its own, which are removed after each round. "bare" is the
plugin alone, where the bars are; "layers" is what open_storage gives, with its deadline (a copy
through memory of the SDK's own) and its checksums; "sglang" is what SGLang would call, over our
contract. Over TCP the store is another process. Without sglang, as in .venv, that part is left out.
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
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from socket import socket

import figures
from figures import Line
from rich.console import Console

from hicache_storage import Buffer, HiCacheStorage, Namespace, Page, open_storage
from hicache_storage.deadline import deadline
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage, library
from hicache_storage_mooncake.client import close_idle
from hicache_storage_mooncake.processes import start_master, start_owner

NAMESPACE = Namespace(model="benchmark", dtype="bfloat16", page_size=64)
BARS = {"embedded": 0.90, "tcp": 0.95}
DEADLINE_SECONDS = 0.5
LATE_SECONDS = 0.1


@dataclass(frozen=True)
class Contestant:
    """One way to move the batch, with keys of its own."""

    put: Callable[[], Sequence[object]]
    get: Callable[[], Sequence[object]]
    remove: Callable[[], None]


def contestants(
    bare: MooncakeStorage, layers: HiCacheStorage, sglang: HiCacheStorage | None, pages: Sequence[Page]
) -> dict[str, Contestant]:
    """All that there are; ``put`` and ``get`` answer truly for each page that was moved."""
    raw = bare._client.store  # the very client that the plugin uses
    addresses = [[buffer.address for buffer in page] for page in pages]
    sizes = [[buffer.nbytes for buffer in page] for page in pages]
    names = {who: [f"{who}-{i}" for i in range(len(pages))] for who in ("raw", "bare", "layers", "sglang")}
    keys = {who: NAMESPACE.keys(of) for who, of in names.items()}

    def removed(who: str) -> Callable[[], None]:
        return lambda: raw.batch_remove(keys[who], True)

    found = {
        "raw": Contestant(
            lambda: [code == 0 for code in raw.batch_put_from_multi_buffers(keys["raw"], addresses, sizes)],
            lambda: [code > 0 for code in raw.batch_get_into_multi_buffers(keys["raw"], addresses, sizes)],
            removed("raw"),
        ),
        "bare": Contestant(
            lambda: bare.batch_set_from(keys["bare"], pages),
            lambda: bare.batch_get_into(keys["bare"], pages),
            removed("bare"),
        ),
        "layers": Contestant(
            lambda: layers.batch_set_from(names["layers"], pages),
            lambda: layers.batch_get_into(names["layers"], pages),
            removed("layers"),
        ),
    }
    if sglang is not None:
        found["sglang"] = Contestant(
            lambda: sglang.batch_set_from(keys["sglang"], pages),
            lambda: sglang.batch_get_into(keys["sglang"], pages),
            lambda: raw.remove_by_regex(f"^{NAMESPACE.model}_", True),
        )
    return found


def open_sglang(table: dict[str, object], whole: Buffer, bare: MooncakeStorage) -> HiCacheStorage | None:
    """SGLang's own backend with memory elsewhere, or None without sglang.

    A client copies within the process only where the segment is its own. So next to a segment of ours
    SGLang's backend works through our client.
    """
    if not find_spec("sglang"):
        return None
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests_sglang"))
    import cpu_stubs

    cpu_stubs.install()
    from hicache_storage.sglang.builtin import builtin_backend

    kind = builtin_backend("mooncake")
    opened = kind(kind.Settings(**{**table, "global_segment_size": 0}), NAMESPACE)
    if table["global_segment_size"]:
        opened.backend.store = bare._client.store
    else:
        opened.register_buffer(whole)
    return opened


def measure(
    table: dict[str, object], pages: Sequence[Page], whole: Buffer, rounds: int, mode: str
) -> list[Line]:
    """Every contestant against one store."""
    bare = MooncakeStorage(MooncakeSettings.model_validate(table), NAMESPACE)
    layers = open_storage("mooncake", {**table, "get_seconds": 60, "set_seconds": 60}, NAMESPACE)
    bare.register_buffer(whole)
    layers.register_buffer(whole)
    found = contestants(bare, layers, open_sglang(table, whole, bare), pages)
    took: dict[str, dict[str, list[float]]] = {what: {who: [] for who in found} for what in ("set", "get")}
    keys: dict[str, int] = {}
    before = bare._client.master.counters(5.0)["keys"]
    for number in range(-1, rounds):  # round -1 warms up
        for who in random.sample(list(found), len(found)):  # the store holds one batch at a time
            for what, call in (("set", found[who].put), ("get", found[who].get)):
                started = time.perf_counter()
                moved = call()
                seconds = time.perf_counter() - started
                assert all(moved), f"{who} did not {what} every page"
                if number >= 0:
                    took[what][who].append(seconds)
            keys[who] = bare._client.master.counters(5.0)["keys"] - before
            found[who].remove()
    layers.close()
    bare.close()
    nbytes = sum(buffer.nbytes for page in pages for buffer in page)
    lines = []
    for what, seconds_of in took.items():
        lines += [
            Line(f"{mode} {what} {who}", nbytes / statistics.median(seconds) / 1e9, "GB/s")
            for who, seconds in seconds_of.items()
        ]
        for who, peer, bar in (
            ("bare", "raw", BARS[mode]),
            ("layers", "raw", None),
            ("bare", "sglang", 1.0),
            ("layers", "sglang", None),
        ):
            if peer in seconds_of:
                ratio = statistics.median(
                    p / o for p, o in zip(seconds_of[peer], seconds_of[who], strict=True)
                )
                held = ("", None) if bar is None else (f">= {bar}", ratio >= bar)
                lines.append(Line(f"{mode} {what} {who}", ratio, f"of {peer}", *held))
    if "sglang" in keys:
        half = keys["bare"] / keys["sglang"]
        lines.append(Line(f"{mode} keys bare", half, "of sglang", "<= 0.5", half <= 0.5))
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
        "sglang": version("sglang") if find_spec("sglang") else "not installed: its own backend was not run",
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
    metrics_port = free_port()
    with deadline(None), start_master(free_port(), metrics_port) as master:
        table: dict[str, object] = {
            "master_server_address": master.address,
            "master_metrics_port": metrics_port,
            "protocol": "tcp",
        }
        lines += measure({**table, "global_segment_size": segment}, pages, whole, options.rounds, "embedded")
        close_idle()
        with start_owner(master.address, segment):
            pure = {**table, "global_segment_size": 0}
            lines += measure(pure, pages, whole, options.rounds, "tcp")
            lines += measure_hang(pure, master.pause, master.resume)
            close_idle()
    console = Console()
    console.print(figures.table(lines))
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
