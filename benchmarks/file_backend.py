"""The file backend next to the plainest code that moves the same bytes.

    python benchmarks/file_backend.py --root DIR --json OUT.json

Everything is measured in one run, in interleaved rounds, and reported as medians and as ratios to
the best plain thread pool of this run: absolute speeds of a shared machine mean little. The plain
reader preads the very files that the backend wrote; the plain writer writes to a temporary name and
renames. All move the same page buffers, with the page cache warm.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import figures
from figures import Line
from rich.console import Console
from rich.table import Table

from hicache_storage import Buffer, HiCacheStorage, Namespace, Page
from hicache_storage.deadline import deadline
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage_file import FileSettings, FileStorage

NAMESPACE = Namespace(model="benchmark", dtype="bfloat16", page_size=64)
PLAIN_THREADS = (1, 2, 3, 4, 6, 8)
DEADLINE_SECONDS = 30.0

BARS = {
    "read": 0.85,
    "read, integrity": 0.70,
    "write": 0.85,
    "write, integrity": 0.70,
    "exists_us": 300.0,
    "extra_mib": 16.0,
}


class Plain:
    """Thread pools that do nothing but move pages: the speed that can be had here."""

    def __init__(self, directory: Path, pages: Sequence[Page]) -> None:
        self.pools = {threads: ThreadPoolExecutor(threads) for threads in PLAIN_THREADS}
        self._directory = directory
        self._views = [[buffer.view for buffer in page] for page in pages]
        self._nbytes = sum(view.nbytes for view in self._views[0])

    def read(self, threads: int, paths: Sequence[str]) -> None:
        def one(i: int) -> None:
            fd = os.open(paths[i], os.O_RDONLY)
            try:
                assert os.preadv(fd, self._views[i], 0) == self._nbytes
            finally:
                os.close(fd)

        list(self.pools[threads].map(one, range(len(paths))))

    def write(self, threads: int, names: Sequence[str]) -> None:
        def one(i: int) -> None:
            temporary = f"{self._directory}/.{names[i]}"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                assert os.pwritev(fd, self._views[i], 0) == self._nbytes
            finally:
                os.close(fd)
            os.rename(temporary, f"{self._directory}/{names[i]}")

        list(self.pools[threads].map(one, range(len(names))))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            os.unlink(f"{self._directory}/{name}")

    def close(self) -> None:
        for pool in self.pools.values():
            pool.shutdown()


def interleaved(
    contestants: dict[str, Callable[[int], None]],
    rounds: int,
    after: Callable[[str, int], None] | None = None,
) -> dict[str, float]:
    """Median seconds of each contestant; all take turns in every round, in changing order."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    for number in range(-1, rounds):  # round -1 warms up
        random.shuffle(order)
        for name in order:
            started = time.perf_counter()
            contestants[name](number)
            took = time.perf_counter() - started
            if after is not None:
                after(name, number)
            if number >= 0:
                seconds[name].append(took)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def measure_reads(
    stores: dict[str, HiCacheStorage], root: Path, pages: Sequence[Page], plain: Plain, rounds: int
) -> dict[str, float]:
    keys = {name: _keys(f"read-{i}-", len(pages)) for i, name in enumerate(stores)}
    for name, store in stores.items():
        assert all(store.batch_set_from(keys[name], pages))
    paths = [_path(root, key) for key in keys["file"]]
    contestants: dict[str, Callable[[int], None]] = {
        f"plain {threads}": lambda _, threads=threads: plain.read(threads, paths) for threads in PLAIN_THREADS
    }
    for name, store in stores.items():
        contestants[name] = lambda _, name=name, store=store: _all(store.batch_get_into(keys[name], pages))
    found = interleaved(contestants, rounds)
    for name, store in stores.items():
        store.delete(keys[name])
    return found


def measure_writes(
    stores: dict[str, HiCacheStorage], pages: Sequence[Page], plain: Plain, rounds: int
) -> dict[str, float]:
    def names(contestant: str, number: int) -> list[str]:
        return [
            f"{contestant.replace(' ', '-').replace(',', '')}-{number + 1}-{i}" for i in range(len(pages))
        ]

    def keys(contestant: str, number: int) -> list[str]:
        return [NAMESPACE.key(name) for name in names(contestant, number)]

    def remove(contestant: str, number: int) -> None:  # before the kernel starts to write it back
        if contestant in stores:
            stores[contestant].delete(keys(contestant, number))
        else:
            plain.remove(names(contestant, number))

    contestants: dict[str, Callable[[int], None]] = {
        f"plain {threads}": lambda number, threads=threads: plain.write(
            threads, names(f"plain {threads}", number)
        )
        for threads in PLAIN_THREADS
    }
    for name, store in stores.items():
        contestants[name] = lambda number, name=name, store=store: _all(
            store.batch_set_from(keys(name, number), pages)
        )
    return interleaved(contestants, rounds, remove)


def measure_exists(root: Path, count: int) -> dict[str, float]:
    """Median microseconds of one 128-key lookup among ``count`` pages."""
    memory = mmap.mmap(-1, 4096)
    page = [Buffer.of(memory).slice(0, 64)]
    with FileStorage(FileSettings(root=root, min_free=0), NAMESPACE) as store:
        keys = _keys("exists-", count)
        for start in range(0, count, 1024):
            batch = keys[start : start + 1024]
            _all(store.batch_set_from(batch, [page] * len(batch)))
        absent = _keys("absent-", count)
        directories = [
            os.open(root / NAMESPACE.digest / f"{number:02x}", os.O_RDONLY) for number in range(256)
        ]
        found: dict[str, list[float]] = {}

        def sample(among: Sequence[str]) -> list[str]:
            # made anew, as by a caller who has just hashed the tokens
            return [NAMESPACE.key(key.partition("/")[2]) for key in random.sample(among, 128)]

        def ask(label: str, asked: Sequence[str], seconds: float | None = None) -> None:
            with deadline(seconds):
                started = time.perf_counter()
                answer = store.batch_exists(asked)
                took = time.perf_counter() - started
            assert set(answer) == {not label.startswith("absent")}
            found.setdefault(f"batch_exists, {label}", []).append(took * 1e6)

        for _ in range(300):
            asked = sample(keys)
            ask("any 128 pages", asked)
            ask("the same again", asked)
            ask("any 128 pages, with a deadline", sample(keys), DEADLINE_SECONDS)
            ask("absent", sample(absent))
            paths = [_shard_and_name(directories, key) for key in sample(keys)]
            started = time.perf_counter()
            for directory, path in paths:
                os.access(path, os.F_OK, dir_fd=directory)
            found.setdefault("bare os.access, any 128 pages", []).append(
                (time.perf_counter() - started) * 1e6
            )
        for directory in directories:
            os.close(directory)
        return {name: statistics.median(taken) for name, taken in found.items()}


def _shard_and_name(directories: Sequence[int], key: str) -> tuple[int, str]:
    name = key.partition("/")[2]
    return directories[zlib.crc32(name.encode()) & 0xFF], name


def measure_memory(root: Path, pages: Sequence[Page]) -> dict[str, float]:
    """MiB that the process grows at its peak, in a storage that was just opened."""
    found = {}
    with FileStorage(FileSettings(root=root, min_free=0), NAMESPACE) as store, deadline(DEADLINE_SECONDS):
        keys = _keys("memory-", len(pages))
        with _peak(found, "write"):
            _all(store.batch_set_from(keys, pages))
        with _peak(found, "read, cached"):
            _all(store.batch_get_into(keys, pages))
        for key in keys:
            fd = os.open(_path(root, key), os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        with _peak(found, "read, from the disk"):
            _all(store.batch_get_into(keys, pages))
        store.delete(keys)
    return found


@contextmanager
def _peak(found: dict[str, float], name: str) -> Iterator[None]:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, proc_pid_clear_refs(5)
    before = _status("VmRSS")
    yield
    found[name] = (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def _keys(prefix: str, count: int) -> list[str]:
    return [NAMESPACE.key(f"{prefix}{i:056x}") for i in range(count)]


def _path(root: Path, key: str) -> str:
    namespace, name = key.split("/")
    return str(next((root / namespace).glob(f"??/{name}")))


def _all(statuses: Sequence[object]) -> None:
    assert all(statuses), statuses


def hardware(root: Path) -> dict[str, str]:
    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = next(
        line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line
    )
    device = os.stat(root).st_dev
    kind = next(
        (
            line.partition(" - ")[2].split()[0]
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if line.split()[2] == f"{os.major(device)}:{os.minor(device)}"
        ),
        "?",
    )
    return {
        "cpu": f"{cpu}, {os.cpu_count()} cores",
        "memory": f"{int(memory) / 2**20:.0f} GiB",
        "kernel": platform.release(),
        "file system": kind,
        "python": platform.python_version(),
        **{name: _version(name) for name in ("hicache-storage", "hicache-storage-file", "xxhash")},
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "from the source tree"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--root", type=Path, help="directory on the disk to measure (default: a temporary one)"
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-mib", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--exists-pages", type=int, default=100_000)
    given = parser.parse_args()
    random.seed(7)
    if given.root is not None:
        given.root.mkdir(parents=True, exist_ok=True)
    root = Path(tempfile.mkdtemp(prefix="hicache-bench-", dir=given.root))
    try:
        lines, rates, facts = measure(
            root, given.pages, given.page_mib << 20, given.rounds, given.exists_pages
        )
    finally:
        shutil.rmtree(root)
    report(lines, rates, facts)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"hardware": facts, "gb_per_s": rates, "figures": [asdict(line) for line in lines]}
        given.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if all(line.passed is not False for line in lines) else 1


def measure(
    root: Path, count: int, nbytes: int, rounds: int, exists_pages: int
) -> tuple[list[Line], dict[str, dict[str, float]], dict[str, str]]:
    memory = mmap.mmap(-1, count * nbytes)
    block = random.randbytes(1 << 20)
    for start in range(0, len(memory), len(block)):
        memory[start : start + len(block)] = block
    whole = Buffer.of(memory)
    half = nbytes // 2  # a page of K and V, as page_first has it
    pages = [
        [whole.slice(i * nbytes, half), whole.slice(i * nbytes + half, nbytes - half)] for i in range(count)
    ]
    extra = measure_memory(root / "memory", pages)
    (root / "plain").mkdir()
    plain = Plain(root / "plain", pages)
    settings = {"min_free": 0, "capacity": 4 * rounds * count * nbytes}
    bare = FileStorage(FileSettings(root=root / "file", **settings), NAMESPACE)
    proved = IntegrityLayer(FileStorage(FileSettings(root=root / "integrity", **settings), NAMESPACE))
    stores: dict[str, HiCacheStorage] = {"file": bare, "file, integrity": proved}
    for store in stores.values():
        store.register_buffer(whole)
    with deadline(None):
        seconds = {
            "read": measure_reads(stores, root / "file", pages, plain, rounds),
            "write": measure_writes(stores, pages, plain, rounds),
        }
    for store in stores.values():
        store.close()
    plain.close()
    exists = measure_exists(root / "exists", exists_pages)

    moved = count * nbytes / 1e9
    rates = {kind: {name: moved / s for name, s in found.items()} for kind, found in seconds.items()}
    lines = []
    for kind, found in rates.items():
        best = max(rate for name, rate in found.items() if name.startswith("plain"))
        for name, label in (("file", kind), ("file, integrity", f"{kind}, integrity")):
            ratio = found[name] / best
            lines.append(
                Line(f"{label} / best plain pool", ratio, "", f">= {BARS[label]:.2f}", ratio >= BARS[label])
            )
    for name, us in exists.items():
        bar = BARS["exists_us"]
        if name == "batch_exists, any 128 pages":
            lines.append(Line(f"{name}, of {exists_pages}", us, "us", f"<= {bar:.0f}", us <= bar))
        else:
            lines.append(Line(name, us, "us"))
    for name, mib in extra.items():
        bar = BARS["extra_mib"]
        lines.append(Line(f"peak extra memory, {name}", mib, "MiB", f"< {bar:.0f}", mib < bar))
    return lines, rates, hardware(root)


def report(lines: Sequence[Line], rates: dict[str, dict[str, float]], facts: dict[str, str]) -> None:
    console = Console()
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()))
    table = Table("GB/s", *next(iter(rates.values())), title="medians")
    for kind, found in rates.items():
        table.add_row(kind, *(f"{rate:.2f}" for rate in found.values()))
    console.print(table)
    console.print(figures.table(lines))


if __name__ == "__main__":
    sys.exit(main())
