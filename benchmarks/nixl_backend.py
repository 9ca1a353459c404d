"""The NIXL backend next to NIXL's own calls, SGLang's own HiCacheNixl, our file backend and plain preadv.

    .venv-sglang-0.5.23/bin/python benchmarks/nixl_backend.py --root DIR --json OUT.json

Everything is measured in one run, in interleaved rounds, on the same pages, and reported as medians
and as ratios within a round. "raw" are bare agent calls, one transfer for the whole batch, on open
files of the same directory; "plugin" is the plugin alone on registered memory; "plugin, deadline" is
the same with a deadline, so that pages pass through its slots; "layers" is what open_storage gives;
"sglang" is what SGLang would call, over our contract; "file" is our file backend with direct_io=on;
"plain" is a pool of threads on os.preadv and os.pwritev. Files are opened with O_DIRECT unless
--buffered is given. Without sglang, as in .venv, its own backend is left out.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from figures import Line, table
from rich.console import Console

from hicache_storage import Buffer, HiCacheStorage, Namespace, Page, open_storage
from hicache_storage.deadline import deadline
from hicache_storage_nixl import NixlSettings, NixlStorage, library

NAMESPACE = Namespace(model="benchmark", dtype="bfloat16", page_size=64)
OF_RAW = 0.95
OF_SGLANG = 1.0
MOVES = ("put", "get", "exists")


@dataclass(frozen=True)
class Contestant:
    """One way to move the batch, in a directory of its own; each call answers truly for each page."""

    put: Callable[[], Sequence[object]]
    get: Callable[[], Sequence[object]]
    exists: Callable[[], Sequence[object]]
    forget: Callable[[], None]


class Raw:
    """Bare agent calls: open, register, one transfer, poll, close."""

    def __init__(
        self, directory: Path, params: dict[str, str], pages: Sequence[Page], whole: Buffer, flags: int
    ) -> None:
        module = library.load()
        self._directory, self._pages, self._flags = directory, pages, flags
        directory.mkdir(parents=True)
        locks = module.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
        self._agent = module.nixl_agent("raw", module.nixl_agent_config(backends=[], sync_mode=locks))
        self._agent.create_backend("POSIX", params)
        region = [(whole.address, whole.nbytes, 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(region, "DRAM"))

    def move(self, operation: str) -> list[bool]:
        """The whole batch, or nothing."""
        flags = self._flags | (os.O_RDONLY if operation == "READ" else os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        fds = [os.open(self._directory / f"{i}", flags, 0o600) for i in range(len(self._pages))]
        memory, files = [], []
        for fd, page in zip(fds, self._pages, strict=True):
            offset = 0
            for buffer in page:
                memory.append((buffer.address, buffer.nbytes, 0))
                files.append((offset, buffer.nbytes, fd))
                offset += buffer.nbytes
        agent = self._agent
        nbytes = sum(buffer.nbytes for buffer in self._pages[0])
        targets = agent.register_memory(agent.get_reg_descs([(0, nbytes, fd, "") for fd in fds], "FILE"))
        handle = agent.initialize_xfer(
            operation, agent.get_xfer_descs(memory, "DRAM"), agent.get_xfer_descs(files, "FILE"), agent.name
        )
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(0.0002)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        agent.deregister_memory(targets)
        for fd in fds:
            os.close(fd)
        return [state == "DONE"] * len(fds)

    def exists(self) -> list[bool]:
        """NIXL's own question for each file."""
        asked = [(0, 0, 0, str(self._directory / f"{i}")) for i in range(len(self._pages))]
        return [found is not None for found in self._agent.query_memory(asked, "POSIX", mem_type="FILE")]

    def forget(self) -> None:
        """Remove the files."""
        for i in range(len(self._pages)):
            (self._directory / f"{i}").unlink(missing_ok=True)


class Plain:
    """A pool of threads, one file each: open, preadv or pwritev, close."""

    def __init__(self, directory: Path, pages: Sequence[Page], flags: int) -> None:
        self._directory, self._pages, self._flags = directory, pages, flags
        self._pool = ThreadPoolExecutor(max(4, os.cpu_count() or 1))
        directory.mkdir(parents=True)

    def move(self, operation: str) -> list[bool]:
        """Page by page."""
        return list(self._pool.map(lambda i: self._one(operation, i), range(len(self._pages))))

    def exists(self) -> list[bool]:
        """One access(2) a file."""
        return [os.access(self._directory / f"{i}", os.F_OK) for i in range(len(self._pages))]

    def forget(self) -> None:
        """Remove the files."""
        for i in range(len(self._pages)):
            (self._directory / f"{i}").unlink(missing_ok=True)

    def _one(self, operation: str, i: int) -> bool:
        views = [buffer.view for buffer in self._pages[i]]
        nbytes = sum(view.nbytes for view in views)
        reading = operation == "READ"
        flags = self._flags | (os.O_RDONLY if reading else os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        fd = os.open(self._directory / f"{i}", flags, 0o600)
        try:
            return (os.preadv(fd, views, 0) if reading else os.pwritev(fd, views, 0)) == nbytes
        finally:
            os.close(fd)


def of_storage(
    storage: HiCacheStorage, keys: Sequence[str], pages: Sequence[Page], seconds: float | None
) -> Contestant:
    """A storage, with this deadline for every call."""

    def put() -> Sequence[object]:
        with deadline(seconds):
            return storage.batch_set_from(keys, pages)

    def get() -> Sequence[object]:
        with deadline(seconds):
            return storage.batch_get_into(keys, pages)

    return Contestant(put, get, lambda: storage.batch_exists(keys), storage.clear)


def contestants(
    stack: ExitStack, options: argparse.Namespace, way: str, pages: Sequence[Page], whole: Buffer
) -> dict[str, Contestant]:
    """All that there are; what they hold open goes to ``stack``."""
    root = options.root / way
    params = {way: "true"}
    flags = 0 if options.buffered else os.O_DIRECT
    direct_io = "off" if options.buffered else "auto"
    names = [f"page-{i}" for i in range(len(pages))]
    keys = NAMESPACE.keys(names)

    def settings(who: str) -> dict[str, object]:
        return {"root": str(root / who), "capacity": "95%", "min_free": 0}

    ours = {"plugin": "posix", "params": params, "direct_io": direct_io}
    slow = {"get_seconds": 60, "set_seconds": 60, "exists_seconds": 60}
    raw, plain = Raw(root / "raw", params, pages, whole, flags), Plain(root / "plain", pages, flags)
    plugin = NixlStorage(NixlSettings.model_validate({**settings("plugin"), **ours}), NAMESPACE)
    layers = open_storage("nixl", {**settings("layers"), **ours, **slow}, NAMESPACE)
    file = open_storage(
        "file",
        {**settings("file"), "direct_io": "off" if options.buffered else "on", "integrity": False, **slow},
        NAMESPACE,
    )
    for storage in (plugin, layers, file):
        stack.enter_context(storage)
        storage.register_buffer(whole)
    found = {
        "raw": Contestant(lambda: raw.move("WRITE"), lambda: raw.move("READ"), raw.exists, raw.forget),
        "plugin": of_storage(plugin, keys, pages, None),
        "plugin, deadline": of_storage(plugin, keys, pages, 60.0),
        "layers": of_storage(layers, names, pages, None),
        "file": of_storage(file, names, pages, None),
        "plain": Contestant(
            lambda: plain.move("WRITE"), lambda: plain.move("READ"), plain.exists, plain.forget
        ),
    }
    sglang = open_sglang(root / "sglang", way, whole, buffered=options.buffered)
    if sglang is not None:
        found["sglang"] = of_storage(sglang, keys, pages, None)
    return found


def open_sglang(directory: Path, way: str, whole: Buffer, *, buffered: bool) -> HiCacheStorage | None:
    """SGLang's own HiCacheNixl, or None without sglang."""
    if not find_spec("sglang"):
        return None
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests_sglang"))
    import cpu_stubs

    cpu_stubs.install()
    from hicache_storage.sglang.builtin import builtin_backend

    os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(directory)
    kind = builtin_backend("nixl")
    table = {
        "plugin": {"posix": {"active": True, way: "true"}},
        "use_direct_io": not buffered,
        "l3_cleaner_enabled": False,
    }
    opened = kind(kind.Settings(**table), NAMESPACE)
    opened.register_buffer(whole)
    return opened


def measure(options: argparse.Namespace, way: str, pages: Sequence[Page], whole: Buffer) -> list[Line]:
    """Every contestant, in random order in each round."""
    with ExitStack() as stack:
        found = contestants(stack, options, way, pages, whole)
        took: dict[str, dict[str, list[float]]] = {move: {who: [] for who in found} for move in MOVES}
        for number in range(-1, options.rounds):  # round -1 warms up
            for who in random.sample(list(found), len(found)):
                for move in MOVES:
                    started = time.perf_counter()
                    moved = getattr(found[who], move)()
                    seconds = time.perf_counter() - started
                    assert all(moved), f"{who} did not {move} every page"
                    if number >= 0:
                        took[move][who].append(seconds)
                found[who].forget()
        return [*lines(way, took, whole.nbytes), *measure_hole(way, found, options.root / way, len(pages))]


def lines(way: str, took: dict[str, dict[str, list[float]]], nbytes: int) -> list[Line]:
    """Speeds, and ratios against the peers that have a bar."""
    found = []
    for move, seconds_of in took.items():
        for who, seconds in seconds_of.items():
            middle = statistics.median(seconds)
            speed = (middle * 1e6, "us") if move == "exists" else (nbytes / middle / 1e9, "GB/s")
            found.append(Line(f"{way} {move} {who}", *speed))
        for who in ("plugin", "plugin, deadline", "layers"):
            for peer, bar in (("raw", OF_RAW), ("sglang", OF_SGLANG), ("file", None), ("plain", None)):
                if peer not in seconds_of or (peer == "raw" and move == "exists"):
                    continue
                ratio = statistics.median(
                    p / o for p, o in zip(seconds_of[peer], seconds_of[who], strict=True)
                )
                held = ("", None) if bar is None or who != "plugin" else (f">= {bar}", ratio >= bar)
                found.append(Line(f"{way} {move} {who}", ratio, f"of {peer}", *held))
    return found


def measure_hole(way: str, found: dict[str, Contestant], root: Path, count: int) -> list[Line]:
    """Pages that come back when one of the batch is missing."""
    back = []
    for who in ("plugin", "sglang"):
        if who not in found:
            continue
        assert all(found[who].put())
        lost = f"page-{count // 2}"
        sought = lost if who == "plugin" else f"*{lost}_*"
        for path in list((root / who).rglob(sought)):
            path.unlink()
        came = sum(map(bool, found[who].get()))
        found[who].forget()
        held = (f"{count - 1}", came == count - 1) if who == "plugin" else ("", None)
        back.append(Line(f"{way} pages of a batch with one missing, {who}", came, f"of {count}", *held))
    return back


def machine(root: Path) -> dict[str, str]:
    """What the figures depend on."""
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    under = [m for m in mounts if root.resolve().is_relative_to(m[1])]
    return {
        "cpu": f"{os.cpu_count()} x {models[0] if models else platform.processor()}",
        "kernel": platform.release(),
        "file system": max(under, key=lambda m: len(m[1]))[2] if under else "?",
        "python": platform.python_version(),
        "nixl": ", ".join(f"{name} {number}" for name, number in library.wheels().items()),
        "sglang": version("sglang") if find_spec("sglang") else "not installed: its own backend was not run",
    }


def main() -> int:
    """Exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="a new directory on the disk to measure")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-kib", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--way", action="append", choices=("use_aio", "use_uring"))
    parser.add_argument("--buffered", action="store_true", help="through the page cache")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    if options.root.exists() and any(options.root.iterdir()):
        parser.error(f"--root: {options.root} is not empty")
    half = options.page_kib << 9
    whole = Buffer.of(mmap.mmap(-1, 2 * half * options.pages))
    ctypes.memset(whole.address, 0x5A, whole.nbytes)
    pages = [
        (whole.slice(2 * i * half, half), whole.slice((2 * i + 1) * half, half)) for i in range(options.pages)
    ]
    found: list[Line] = []
    try:
        for way in options.way or ("use_aio", "use_uring"):
            found += measure(options, way, pages, whole)
        facts = machine(options.root)
    finally:
        shutil.rmtree(options.root, ignore_errors=True)
    Console().print(table(found))
    Console().print(json.dumps(facts, indent=1))
    if options.json:
        given = {key: str(value) for key, value in vars(options).items() if key not in ("json", "root")}
        report = {"machine": facts, "options": given, "lines": [asdict(line) for line in found]}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return any(line.passed is False for line in found)


if __name__ == "__main__":
    sys.exit(main())
