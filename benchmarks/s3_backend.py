"""The S3 backend next to its raw client, and to SGLang's ``seaweedfs`` backend.

    make bench-s3 ARGS="--server nginx --json OUT.json"
    make bench-s3 ARGS="--server ceph"

``make bench-s3`` runs it in SGLang's environment; elsewhere it does without ``seaweedfs``.

Servers run here, on loopback: ``nginx`` with WebDAV checks nothing and is the ceiling for what a
client can reach; ``ceph`` is the RADOS Gateway with ``tcp_nodelay``, ``ceph-default`` without. All
contestants move the same pages of two buffers, in interleaved rounds, and are reported as medians,
with the CPU time of this process. Ratios are medians of the rounds' ratios: what else the machine
does meanwhile slows both sides of a round.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import random
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol

import obstore
from rich.console import Console
from rich.table import Table

from hicache_storage import Buffer, Namespace, Page
from hicache_storage.buffers import scatter
from hicache_storage.deadline import deadline
from hicache_storage_s3 import S3Settings, S3Storage
from hicache_storage_s3.client import make_store
from hicache_storage_s3.probe import Probe

TESTS = Path(__file__).parent.parent / "plugins" / "s3" / "tests"
sys.path.insert(0, str(TESTS))

import faulty  # noqa: E402
import servers  # noqa: E402

NAMESPACE = Namespace(model="benchmark", dtype="bfloat16", page_size=64)
PAGES = 128
DEADLINE_SECONDS = 120.0
LATENCY = 0.020


class Contestant(Protocol):
    """Moves the pages of a batch; each method returns when all are moved."""

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None: ...
    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None: ...
    def lookup(self, keys: Sequence[str]) -> int: ...
    def close(self) -> None: ...


class Raw:
    """obstore and a thread pool, with the checksum that the backend uses: nothing else."""

    def __init__(self, settings: S3Settings, threads: int) -> None:
        checksum = "" if settings.checksum == "off" else settings.checksum
        self._store = make_store(settings, DEADLINE_SECONDS, checksum)
        self._pool = ThreadPoolExecutor(threads)
        self._prefix = f"{settings.prefix}/"

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        def one(key: str, page: Page) -> None:
            body = b"".join(buffer.view for buffer in page)
            obstore.put(self._store, self._prefix + key, body, use_multipart=False)

        list(self._pool.map(one, keys, pages))

    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        def one(key: str, page: Page) -> None:
            scatter(obstore.get(self._store, self._prefix + key).bytes(), page)

        list(self._pool.map(one, keys, pages))

    def lookup(self, keys: Sequence[str]) -> int:
        return len(list(self._pool.map(lambda key: obstore.head(self._store, self._prefix + key), keys)))

    def close(self) -> None:
        self._pool.shutdown()


class Plugin:
    """The backend without layers."""

    def __init__(self, settings: S3Settings) -> None:
        self.storage = S3Storage(settings, NAMESPACE)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        with deadline(DEADLINE_SECONDS):
            assert all(self.storage.batch_set_from(keys, pages))

    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        with deadline(DEADLINE_SECONDS):
            assert all(self.storage.batch_get_into(keys, pages))

    def lookup(self, keys: Sequence[str]) -> int:
        with deadline(DEADLINE_SECONDS):
            return sum(self.storage.batch_exists(keys))

    def forget(self, keys: Sequence[str]) -> None:
        """Make the next lookup of these keys a cold one."""
        assert self.storage._opened is not None
        self.storage._opened.lookup.sightings.discard(keys)

    @property
    def checksum(self) -> str:
        """What uploads carry."""
        assert self.storage._opened is not None
        return self.storage._opened._found.checksum

    def requests(self) -> dict[str, int]:
        assert self.storage._opened is not None
        return self.storage._opened.client.requests

    def close(self) -> None:
        self.storage.close()


class SeaweedFS:
    """SGLang's backend ``seaweedfs``, as SGLang opens it: boto3 with 16 threads."""

    def __init__(self, settings: S3Settings) -> None:
        from hicache_storage.sglang.builtin import builtin_backend

        assert settings.access_key_id is not None
        assert settings.secret_access_key is not None
        kind = builtin_backend("seaweedfs")
        assert kind.Settings is not None
        table = {
            "endpoint": settings.endpoint,
            "bucket": settings.bucket,
            "access_key": settings.access_key_id.get_secret_value(),
            "secret_key": settings.secret_access_key.get_secret_value(),
        }
        self._storage = kind(kind.Settings(**table), NAMESPACE)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        assert all(self._storage.batch_set_from(keys, pages))

    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        assert all(self._storage.batch_get_into(keys, pages))

    def lookup(self, keys: Sequence[str]) -> int:
        return sum(self._storage.batch_exists(keys))

    def close(self) -> None:
        self._storage.close()


@dataclass(frozen=True)
class Place:
    """A running server, and how to empty it between rounds."""

    settings: S3Settings
    empty: Callable[[], None]


@contextmanager
def nginx(directory: Path) -> Iterator[Place]:
    """WebDAV by nginx: takes anything, lists nothing."""
    binary = shutil.which("nginx") or "/usr/sbin/nginx"
    port = servers.free_port()
    data = directory / "data"
    (data / "pages").mkdir(parents=True)
    (directory / "nginx.conf").write_text(
        f"""
        daemon off; worker_processes 2; pid {directory}/nginx.pid; error_log {directory}/error.log;
        {"user root;" if os.getuid() == 0 else ""}
        events {{ worker_connections 512; }}
        http {{
          access_log off; sendfile on; tcp_nodelay on; client_max_body_size 0; keepalive_requests 1000000;
          client_body_temp_path {directory}/tmp; client_body_buffer_size 256k;
          etag off; add_header ETag "x" always;  # obstore wants one
          server {{
            listen 127.0.0.1:{port}; root {data};
            location = /pages {{ return 200; }}
            dav_methods PUT DELETE; create_full_put_path on; dav_access user:rw group:rw all:r;
          }}
        }}
        """
    )
    process = subprocess.Popen([binary, "-c", str(directory / "nginx.conf"), "-p", str(directory)])
    try:
        while not servers._answers(port):
            assert process.poll() is None, "nginx does not start"
            time.sleep(0.05)
        Probe._check_list = lambda _: None  # type: ignore[method-assign,misc]  # WebDAV cannot list
        table = {"endpoint": f"http://127.0.0.1:{port}", "access_key_id": "a", "secret_access_key": "b"}
        settings = S3Settings(bucket="pages", **table)  # type: ignore[arg-type]

        def empty() -> None:
            for found in (data / "pages").iterdir():
                shutil.rmtree(found)

        yield Place(settings, empty)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


@contextmanager
def served(name: str, directory: Path) -> Iterator[Place]:
    """A server of the tests."""
    start = {"ceph-default": partial(servers.ceph, tcp_nodelay=False)}.get(name) or getattr(servers, name)
    with start(directory) as server:
        table = server.settings(create_bucket=True)
        if name == "ministack":
            table["checksum"] = "off"  # it takes a second for 10 MB
        settings = S3Settings(**table)
        store = make_store(settings, DEADLINE_SECONDS, "")

        def empty() -> None:
            for some in obstore.list(store):
                obstore.delete(store, [found["path"] for found in some])

        yield Place(settings, empty)


def make_pages(nbytes: int) -> list[Page]:
    """Pages of two buffers, as K and V lie in page_first."""
    half = nbytes // 2
    return [
        [Buffer.of(bytearray(random.randbytes(1024) * (half // 1024))) for _ in range(2)]
        for _ in range(PAGES)
    ]


def chain(label: str) -> list[str]:
    source = random.Random(f"{label}{time.time_ns()}")
    return NAMESPACE.keys([source.randbytes(32).hex() for _ in range(PAGES)])


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds and CPU seconds of this process."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    call()
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    return wall, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


@dataclass(frozen=True)
class Moves:
    """Wall and CPU seconds of moving all pages one way, a pair for each round."""

    nbytes: int
    rounds: list[tuple[float, float]]

    @property
    def speed(self) -> float:
        """MB/s."""
        return self.nbytes / 1e6 / statistics.median(wall for wall, _ in self.rounds)

    @property
    def cpu(self) -> float:
        """CPU seconds of this process for a GB."""
        return statistics.median(cpu for _, cpu in self.rounds) / (self.nbytes / 1e9)

    def times_faster(self, other: Moves) -> float:
        """The median of the rounds' ratios."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(theirs / ours for (ours, _), (theirs, _) in pairs)


def measure_moves(
    contestants: dict[str, Contestant], place: Place, nbytes: int, rounds: int
) -> dict[str, dict[str, Moves]]:
    """By contestant and direction."""
    source, target = make_pages(nbytes), make_pages(nbytes)
    found = {name: {way: Moves(nbytes * PAGES, []) for way in ("put", "get")} for name in contestants}
    order = list(contestants)
    for number in range(-1, rounds):  # round -1 warms up
        random.shuffle(order)
        for name in order:
            keys, one = chain(name), contestants[name]
            put = timed(partial(one.put, keys, source))
            get = timed(partial(one.get, keys, target))
            place.empty()
            if number >= 0:
                found[name]["put"].rounds.append(put)
                found[name]["get"].rounds.append(get)
    return found


def measure_lookups(place: Place, contestants: dict[str, Contestant]) -> dict[str, float]:
    """Median seconds to look up 128 present pages."""
    keys, pages = chain("lookup"), make_pages(2048)
    for contestant in contestants.values():
        contestant.put(keys, pages)
    found: dict[str, list[float]] = {}
    for _ in range(7):
        for name, contestant in contestants.items():
            if isinstance(contestant, Plugin):
                contestant.lookup(keys[:1])
                contestant.forget(keys)
                found.setdefault(f"{name}, first time", []).append(timed(partial(contestant.lookup, keys))[0])
                name = f"{name}, again"  # noqa: PLW2901
            found.setdefault(name, []).append(timed(partial(contestant.lookup, keys))[0])
    place.empty()
    return {name: statistics.median(seconds[1:]) for name, seconds in found.items()}


def far_away(place: Place, latency: float) -> tuple[faulty.Proxy, S3Settings]:
    host, _, port = place.settings.endpoint.removeprefix("http://").partition(":")
    proxy = faulty.Proxy((host, int(port)))
    proxy.fault = lambda *_: faulty.Fault(delay=latency)
    return proxy, place.settings.model_copy(update={"endpoint": proxy.url})


def measure_requests(place: Place, prices: dict[str, float]) -> dict[str, tuple[str, float]]:
    """By operation on 128 pages: the requests it took, and dollars for a million pages."""
    plugin, reader = Plugin(place.settings), Plugin(place.settings)
    keys, pages = chain("requests"), make_pages(65_536 * 2)
    calls: dict[str, tuple[Plugin, Callable[[], object]]] = {
        "store new pages": (plugin, lambda: plugin.put(keys, pages)),
        "store present pages": (reader, lambda: reader.put(keys, pages)),
        "look up, first time": (reader, lambda: (reader.forget(keys), reader.lookup(keys))),
        "look up again": (reader, lambda: reader.lookup(keys)),
        "look up absent": (reader, lambda: reader.lookup(chain("absent"))),
        "read": (reader, lambda: reader.get(keys, pages)),
    }
    lines = {}
    for name, (who, call) in calls.items():
        before = who.requests()
        call()
        sent = {op: n - before.get(op, 0) for op, n in who.requests().items() if n > before.get(op, 0)}
        dollars = sum(prices[op] * n for op, n in sent.items()) / 1000 / PAGES * 1e6
        lines[name] = (", ".join(f"{n} {op}" for op, n in sorted(sent.items())), dollars)
    place.empty()
    plugin.close()
    reader.close()
    return lines


def measure_memory(place: Place) -> dict[str, float]:
    """MiB over the buffers at the peak of moving 128 pages of 4 MiB."""
    plugin, keys, pages = Plugin(place.settings), chain("memory"), make_pages(4 << 20)
    found = {}
    for name, call in {
        "put": lambda: plugin.put(keys, pages),
        "get": lambda: plugin.get(keys, pages),
    }.items():
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        call()
        found[name] = (_status("VmHWM") - before) / 1024
    place.empty()
    plugin.close()
    return found


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def judge(
    moves: dict[int, dict[str, dict[str, Moves]]], lookups: dict[str, float], far: dict[str, float]
) -> list[tuple[str, float, str, bool]]:
    """Figures, the bars they are held to, and whether they pass."""
    lines = []

    def line(name: str, value: float, bar: float, at_least: bool = True) -> None:
        passed = value >= bar if at_least else value <= bar
        lines.append((name, value, f"{'>=' if at_least else '<='} {bar:g}", passed))

    bars = {("get", 4 << 20): 1.5, ("get", 512 << 10): 3.0, ("put", 512 << 10): 3.0}
    for nbytes, found in moves.items():
        size = f"{nbytes >> 10} KiB"
        raw = [ways for name, ways in found.items() if name.startswith("raw")]
        plugin, seaweedfs = found["plugin"], found.get("seaweedfs")
        for way in ("put", "get"):
            times = min(plugin[way].times_faster(ways[way]) for ways in raw)
            line(f"{way} {size}, plugin / best raw client", times, 0.95)
            if seaweedfs is None:
                continue
            if (way, nbytes) in bars:
                times = plugin[way].times_faster(seaweedfs[way])
                line(f"{way} {size}, plugin / seaweedfs", times, bars[way, nbytes])
            share = plugin[way].cpu / seaweedfs[way].cpu
            line(f"{way} {size}, CPU s/GB, plugin / seaweedfs", share, 0.5, at_least=False)
    if "seaweedfs" in lookups:
        times = lookups["seaweedfs"] / lookups["plugin, first time"]
        line("lookup, plugin / seaweedfs, first time", times, 10)
    trips = far["plugin, first time"] / LATENCY
    line(f"lookup with {LATENCY * 1e3:.0f} ms added, round trips", trips, 3, at_least=False)
    return lines


def facts() -> dict[str, str]:
    """The machine and the versions."""
    cpu = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in x
        ),
        "?",
    )
    found = {
        "cpu": f"{cpu}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') >> 30} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.1f} in the minute before",
    }
    for name in ("obstore", "boto3", "sglang", "hicache-storage", "hicache-storage-s3"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "?"
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--server", choices=["nginx", "ceph", "ceph-default", "ministack", "rclone"], default="nginx"
    )
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--json", type=Path)
    options.add_argument(
        "--put-price", type=float, default=0.005, help="dollars for 1000 PUT or LIST requests"
    )
    options.add_argument(
        "--get-price", type=float, default=0.0004, help="dollars for 1000 GET or HEAD requests"
    )
    options.add_argument("--directory", help="where the server keeps its files; /dev/shm for nginx")
    given = options.parse_args()
    prices = {
        "PUT": given.put_price,
        "LIST": given.put_price,
        "GET": given.get_price,
        "HEAD": given.get_price,
    }
    prices["DELETE"] = 0.0
    where = given.directory or ("/dev/shm" if given.server == "nginx" else None)
    result: dict[str, Any] = {"server": given.server, "facts": facts()}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where)))
        try:
            start = nginx(directory) if given.server == "nginx" else served(given.server, directory)
            place = stack.enter_context(start)
        except (servers.MissingError, OSError) as error:
            print(f"{given.server} cannot be had here: {error}", file=sys.stderr)
            return 2

        def entered(made: dict[str, Contestant]) -> dict[str, Contestant]:
            for contestant in made.values():
                stack.callback(contestant.close)
            return made

        plugin = Plugin(place.settings)
        raw = place.settings.model_copy(update={"checksum": plugin.checksum})
        indirect = {"direct_get": "off", "direct_put": "off"}
        contestants: dict[str, Contestant] = {
            "plugin": plugin,
            "plugin, all through obstore": Plugin(place.settings.model_copy(update=indirect)),
            "raw obstore, 8 threads": Raw(raw, 8),
            "raw obstore, 16 threads": Raw(raw, 16),
        }
        with_sglang = importlib.util.find_spec("sglang") is not None
        if with_sglang:
            contestants["seaweedfs"] = SeaweedFS(place.settings)
        else:
            print("without seaweedfs: SGLang is not installed here, see make bench-s3", file=sys.stderr)
        entered(contestants)
        moves = {n: measure_moves(contestants, place, n, given.rounds) for n in (4 << 20, 512 << 10)}
        lookers = ("raw obstore, 16 threads", "plugin", "seaweedfs")
        lookups = measure_lookups(place, {name: contestants[name] for name in lookers if name in contestants})
        proxy, behind = far_away(place, LATENCY)
        stack.callback(proxy.close)
        distant: dict[str, Contestant] = {"plugin": Plugin(behind)}
        if with_sglang:
            distant["seaweedfs"] = SeaweedFS(behind)
        far = measure_lookups(place, entered(distant))
        requests = measure_requests(place, prices)
        memory = measure_memory(place)
        result["in force"] = plugin.storage.describe()
    lines = judge(moves, lookups, far)
    lines += [(f"memory over the buffers, {way}, MiB", n, "<= 64", n <= 64) for way, n in memory.items()]
    result["moves"] = {
        str(n): {name: {way: asdict(moved) for way, moved in ways.items()} for name, ways in found.items()}
        for n, found in moves.items()
    }
    result |= {"lookups": lookups, "far lookups": far}
    result |= {"requests": requests, "figures": lines}
    if given.json:
        given.json.write_text(json.dumps(result, indent=1))
    show(result, moves, lines)
    return 0 if all(passed for *_, passed in lines) else 1


def show(
    result: dict[str, Any], moves: dict[int, Any], lines: Sequence[tuple[str, float, str, bool]]
) -> None:
    console = Console(width=110)
    console.print(", ".join(f"{name} {value}" for name, value in result["facts"].items()))
    console.print(
        f"server: {result['server']}; "
        + "; ".join(result["in force"][x] for x in ("reads", "writes", "checksum"))
    )
    for nbytes, found in moves.items():
        table = Table(f"{PAGES} pages of {nbytes >> 10} KiB", "put MB/s", "CPU s/GB", "get MB/s", "CPU s/GB")
        for name, ways in found.items():
            table.add_row(
                name,
                *(
                    text
                    for way in ("put", "get")
                    for text in (f"{ways[way].speed:.0f}", f"{ways[way].cpu:.2f}")
                ),
            )
        console.print(table)
    table = Table(f"lookup of {PAGES} present pages, ms", "here", f"{LATENCY * 1e3:.0f} ms away")
    for name, seconds in result["lookups"].items():
        far = result["far lookups"].get(name)
        table.add_row(name, f"{seconds * 1e3:.1f}", f"{far * 1e3:.1f}" if far else "")
    console.print(table)
    table = Table(f"{PAGES} pages", "requests", "dollars for a million pages")
    for name, (sent, dollars) in result["requests"].items():
        table.add_row(name, sent, f"{dollars:.3f}")
    console.print(table)
    table = Table("figure", "value", "bar", "")
    for name, value, bar, passed in lines:
        table.add_row(name, f"{value:.2f}", bar, "pass" if passed else "FAIL")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
