"""SGLang's real cache controller over our file backend and over its own: GB/s, damage, the GIL.

    .venv-sglang-0.5.23/bin/python benchmarks/sglang_controller.py --root DIR --json OUT

128 pages of 4 MiB, in rounds that alternate between the backends, page cache warm. Seconds are
those that the controller spends in its backup and prefetch of one operation, so they hold what
SGLang adds: its queues are left out, its copies are not. Three figures a backend:

* GB/s of backup and of prefetch, medians;
* pages that come back when the last of the 128 is cut short on disk;
* the speed that a spinning pure-Python thread keeps while prefetch runs, a stand-in for SGLang's
  scheduler: what is missing to 100 % is the GIL tax.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

HARNESS = Path(__file__).parents[1] / "tests_sglang"
sys.path.insert(0, str(HARNESS))

import cpu_stubs  # noqa: E402

cpu_stubs.install()

from real_cache import RealCache  # noqa: E402
from real_pools import CacheSpec  # noqa: E402

PAGES = 128
FETCHES = 4
SPEC = CacheSpec(
    mem_layout="page_first_direct",
    io_backend="direct",
    page_size=256,
    layers=8,
    heads=8,
    head_dim=64,
    device_tokens=(PAGES + 2) * 256,
    host_ratio=1.1,
)
PAGE_NBYTES = 2 * SPEC.page_size * SPEC.layers * SPEC.heads * SPEC.head_dim * 2


class Timed:
    """A real cache whose controller's storage operations are timed."""

    def __init__(self, name: str, root: Path) -> None:
        self.name = name
        self.root = root / name
        self.seconds: dict[str, list[float]] = {"backup": [], "prefetch": []}
        if name == "sglang file":
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.root)
            self.cache = RealCache(SPEC, "file")
        else:
            extra = {"module_path": "hicache_storage.sglang", "class_name": "HiCacheBackend"}
            settings = {"root": str(self.root), "min_free": 0, "negative_ttl": 0}
            self.cache = RealCache(
                SPEC, "dynamic", {"backend_name": "file", "interface_v1": 1, **extra, **settings}
            )
        controller = self.cache.controller
        controller._page_backup = self._timed("backup", controller._page_backup)
        controller._page_transfer = self._timed("prefetch", controller._page_transfer)

    def _timed(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(operation: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(operation)
            finally:
                self.seconds[what].append(time.perf_counter() - start)

        return timed

    def rate(self, what: str) -> float:
        """Median GB/s (10^9 bytes)."""
        return PAGES * PAGE_NBYTES / statistics.median(self.seconds[what]) / 1e9

    def files(self) -> list[Path]:
        found = [p for p in self.root.rglob("*") if p.is_file() and p.stat().st_size >= PAGE_NBYTES]
        return sorted(found, key=lambda p: p.stat().st_mtime_ns)


def one_round(timed: Timed, seed: int) -> None:
    """Store fresh pages, then forget and fetch them some times; the first fetch only warms up."""
    cache = timed.cache
    tokens = cache.tokens(PAGES, seed=seed)
    assert cache.store(tokens) == PAGES
    for _ in range(1 + FETCHES):
        cache.forget()
        assert cache.prefetch(tokens) == PAGES
    timed.seconds["prefetch"].pop(-1 - FETCHES)
    cache.forget()
    for page in timed.files():
        page.unlink()


def pages_after_a_cut(timed: Timed) -> int:
    """How many of 128 pages come back when the last one's file is too short."""
    cache = timed.cache
    tokens = cache.tokens(PAGES, seed=10_001)
    known = set(timed.files())
    cache.store(tokens[: -SPEC.page_size])
    before = set(timed.files())
    cache.forget()
    cache.store(tokens)
    (last,) = set(timed.files()) - before
    assert len(before - known) == PAGES - 1
    cache.forget()
    os.truncate(last, last.stat().st_size // 2)
    return int(cache.prefetch(tokens))


def spinning_share(timed: Timed, seconds: float) -> tuple[float, float]:
    """Speed of a pure-Python loop while pages are fetched without pause, relative to alone.

    Also the GB/s of fetching beside it: whoever fetches waits for the GIL after every system call.
    """
    cache = timed.cache
    tokens = cache.tokens(PAGES, seed=10_002)
    cache.forget()
    cache.store(tokens)
    count, fetches, stop = 0, 0, threading.Event()

    def spin() -> None:
        nonlocal count
        while not stop.is_set():
            for _ in range(1000):
                pass
            count += 1

    def rate(busy: Callable[[], None]) -> float:
        started, before = time.perf_counter(), count
        while time.perf_counter() - started < seconds:
            busy()
        return (count - before) / (time.perf_counter() - started)

    controller = cache.controller
    hashes = [page_hash for operation in cache._backups for page_hash in operation.hash_value]
    cache.forget()
    indices = controller.mem_pool_host.alloc(PAGES * SPEC.page_size)
    backend = cache.backend

    def fetch() -> None:
        nonlocal fetches
        fetches += 1
        if timed.name == "sglang file":
            pages = [controller.storage_host_pool.get_dummy_flat_data_page() for _ in hashes]
            for i, page in enumerate(backend.batch_get(hashes, pages)):
                controller.storage_host_pool.set_from_flat_data_page(indices[i * SPEC.page_size], page)
        else:
            assert all(backend.batch_get_v1(hashes, indices))

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        alone = rate(lambda: time.sleep(0.01))
        started = time.perf_counter()
        fetching = rate(fetch)
        took = time.perf_counter() - started
    finally:
        stop.set()
        thread.join()
        controller.mem_pool_host.free(indices)
    return fetching / alone, fetches * PAGES * PAGE_NBYTES / took / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, required=True, help="an empty directory on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    backends = [Timed("sglang file", options.root), Timed("file", options.root)]
    for number in range(options.rounds):
        for timed in backends:
            one_round(timed, seed=number)
    figures: dict[str, Any] = {
        "hardware": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("sglang", "torch", "hicache-storage-file")},
        "python": platform.python_version(),
        "pages": PAGES,
        "page_nbytes": PAGE_NBYTES,
        "rounds": options.rounds,
    }
    for timed in backends:
        share, beside = spinning_share(timed, 3.0)
        rates = {what: round(timed.rate(what), 2) for what in ("backup", "prefetch")}
        figures[timed.name] = {
            **{f"{what}_gb_s": rate for what, rate in rates.items()},
            "pages_after_a_cut": pages_after_a_cut(timed),
            "spinning_thread_share": round(share, 3),
            "gb_s_beside_it": round(beside, 2),
        }
        timed.cache.close()
        shutil.rmtree(timed.root, ignore_errors=True)
    theirs, ours = figures["sglang file"], figures["file"]
    for what in ("backup", "prefetch"):
        figures[f"{what}_ratio"] = round(ours[f"{what}_gb_s"] / theirs[f"{what}_gb_s"], 2)
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
