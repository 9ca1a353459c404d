"""The S3 backend next to its raw client, and to boto3 used as SGLang's ``seaweedfs`` backend does.

    python benchmarks/s3_backend.py --server nginx --json OUT.json
    python benchmarks/s3_backend.py --server ceph

Servers run here, on loopback: ``nginx`` with WebDAV checks nothing and is the ceiling for what a
client can reach; ``ceph`` is the RADOS Gateway. All contestants move the same pages of two buffers,
in interleaved rounds, and are reported as medians, with the CPU time of this process. Absolute
speeds of a shared machine mean little; ratios to the others of the same run mean more.
"""

from __future__ import annotations

import argparse
import ctypes
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
from dataclasses import dataclass
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
BOTO3_WORKERS = 16


class Contestant(Protocol):
    """Moves the pages of a batch; each method returns when all are moved."""

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None: ...
    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None: ...
    def lookup(self, keys: Sequence[str]) -> int: ...
    def close(self) -> None: ...


class Raw:
    """obstore and a thread pool, with the checksum that the backend would use: nothing else."""

    def __init__(self, settings: S3Settings, threads: int) -> None:
        checksum = {"auto": "crc64nvme", "off": ""}.get(settings.checksum, settings.checksum)
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

    def requests(self) -> dict[str, int]:
        assert self.storage._opened is not None
        return self.storage._opened.client.requests

    def close(self) -> None:
        self.storage.close()


class Boto3:
    """The calls of sglang 0.5.23's seaweedfs_store.py, line by line, on pages of ours."""

    def __init__(self, settings: S3Settings) -> None:
        import boto3
        from botocore.config import Config

        assert settings.access_key_id is not None
        assert settings.secret_access_key is not None
        self._s3 = boto3.client(
            "s3",
            endpoint_url=settings.endpoint,
            region_name="us-east-1",
            config=Config(
                s3={"addressing_style": "path"},
                max_pool_connections=BOTO3_WORKERS,
                retries={"max_attempts": 3, "mode": "standard"},
            ),
            aws_access_key_id=settings.access_key_id.get_secret_value(),
            aws_secret_access_key=settings.secret_access_key.get_secret_value(),
        )
        self._bucket, self._prefix = settings.bucket, f"{settings.prefix}/"
        self._pool = ThreadPoolExecutor(BOTO3_WORKERS)

    def put(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        def one(key: str, page: Page) -> None:
            body = bytearray(sum(buffer.nbytes for buffer in page))
            target = ctypes.addressof(ctypes.c_char.from_buffer(body))
            for buffer in page:
                ctypes.memmove(target, buffer.address, buffer.nbytes)
                target += buffer.nbytes
            self._s3.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body)

        for future in [self._pool.submit(one, key, page) for key, page in zip(keys, pages, strict=True)]:
            future.result()

    def get(self, keys: Sequence[str], pages: Sequence[Page]) -> None:
        def one(key: str, page: Page) -> None:
            data = self._s3.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"].read()
            source = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
            for buffer in page:
                ctypes.memmove(buffer.address, source, buffer.nbytes)
                source += buffer.nbytes

        for future in [self._pool.submit(one, key, page) for key, page in zip(keys, pages, strict=True)]:
            future.result()

    def lookup(self, keys: Sequence[str]) -> int:
        def one(key: str) -> object:
            return self._s3.head_object(Bucket=self._bucket, Key=self._prefix + key)

        return len([f.result() for f in [self._pool.submit(one, key) for key in keys]])

    def close(self) -> None:
        self._pool.shutdown()
        self._s3.close()


@dataclass(frozen=True)
class Place:
    """A running server, and how to empty it between rounds."""

    settings: S3Settings
    empty: Callable[[Sequence[str]], None]


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

        def empty(keys: Sequence[str]) -> None:
            for key in keys:
                (data / "pages" / "hicache" / key).unlink(missing_ok=True)

        yield Place(settings, empty)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(10)


@contextmanager
def served(name: str, directory: Path) -> Iterator[Place]:
    """A server of the tests."""
    with getattr(servers, name)(directory) as server:
        table = server.settings(create_bucket=True)
        if name == "ministack":
            table["checksum"] = "off"  # it takes a second for 10 MB
        settings = S3Settings(**table)
        store = make_store(settings, DEADLINE_SECONDS, "")

        def empty(keys: Sequence[str]) -> None:
            obstore.delete(store, [f"hicache/{key}" for key in keys])

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


def measure_moves(
    contestants: dict[str, Contestant], place: Place, nbytes: int, rounds: int
) -> dict[str, dict[str, tuple[float, float]]]:
    """By contestant and direction: median MB/s, and CPU seconds a GB."""
    source, target = make_pages(nbytes), make_pages(nbytes)
    taken: dict[str, dict[str, list[tuple[float, float]]]] = {n: {"put": [], "get": []} for n in contestants}
    order = list(contestants)
    for number in range(-1, rounds):  # round -1 warms up
        random.shuffle(order)
        for name in order:
            keys = chain(name)
            put = timed(lambda name=name, keys=keys: contestants[name].put(keys, source))  # type: ignore[misc]
            get = timed(lambda name=name, keys=keys: contestants[name].get(keys, target))  # type: ignore[misc]
            place.empty(keys)
            if number >= 0:
                taken[name]["put"].append(put)
                taken[name]["get"].append(get)
    moved = nbytes * PAGES
    return {
        name: {
            way: (
                moved / 1e6 / statistics.median(wall for wall, _ in found),
                statistics.median(cpu for _, cpu in found) / (moved / 1e9),
            )
            for way, found in ways.items()
        }
        for name, ways in taken.items()
    }


def measure_lookups(place: Place, contestants: dict[str, Contestant]) -> dict[str, float]:
    """Median seconds to look up 128 present pages."""
    keys, pages = chain("lookup"), make_pages(2048)
    plugin = contestants["plugin"]
    assert isinstance(plugin, Plugin)
    plugin.put(keys, pages)
    found: dict[str, list[float]] = {}
    for _ in range(7):
        for name, contestant in contestants.items():
            if isinstance(contestant, Plugin):
                contestant.lookup(keys[:1])
                contestant.forget(keys)
                found.setdefault(f"{name}, first time", []).append(
                    timed(lambda c=contestant: c.lookup(keys))[0]
                )  # type: ignore[misc]
                name = f"{name}, again"  # noqa: PLW2901
            found.setdefault(name, []).append(timed(lambda c=contestant: c.lookup(keys))[0])  # type: ignore[misc]
    place.empty(keys)
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
    place.empty(keys)
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
    place.empty(keys)
    plugin.close()
    return found


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1])
    raise LookupError(field)


def judge(
    moves: dict[int, dict[str, dict[str, tuple[float, float]]]],
    lookups: dict[str, float],
    far: dict[str, float],
) -> list[tuple[str, float, str, bool]]:
    """Figures, the bars they are held to, and whether they pass."""
    lines = []

    def line(name: str, value: float, bar: float, at_least: bool = True) -> None:
        passed = value >= bar if at_least else value <= bar
        lines.append((name, value, f"{'>=' if at_least else '<='} {bar:g}", passed))

    for nbytes, found in moves.items():
        size = f"{nbytes >> 10} KiB"
        raw = {
            way: max(ways[way][0] for name, ways in found.items() if name.startswith("raw"))
            for way in ("put", "get")
        }
        for way in ("put", "get"):
            line(f"{way} {size}, plugin / best raw client", found["plugin"][way][0] / raw[way], 0.95)
        for way in ("put", "get"):
            bar = {("get", 4 << 20): 1.5, ("get", 512 << 10): 3.0, ("put", 512 << 10): 3.0}.get((way, nbytes))
            if bar:
                line(f"{way} {size}, plugin / boto3", found["plugin"][way][0] / found["boto3"][way][0], bar)
        for way in ("put", "get"):
            share = found["plugin"][way][1] / found["boto3"][way][1]
            line(f"{way} {size}, CPU s/GB, plugin / boto3", share, 0.5, at_least=False)
    line("lookup, boto3 / plugin, first time", lookups["boto3"] / lookups["plugin, first time"], 10)
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
    for name in ("obstore", "boto3", "hicache-storage", "hicache-storage-s3"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "?"
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--server", choices=["nginx", "ceph", "ministack", "rclone"], default="nginx")
    options.add_argument("--rounds", type=int, default=5)
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

        def contest(settings: S3Settings) -> dict[str, Contestant]:
            made: dict[str, Contestant] = {
                "raw obstore, 8 threads": Raw(settings, 8),
                "raw obstore, 16 threads": Raw(settings, 16),
                "plugin": Plugin(settings),
                "boto3": Boto3(settings),
            }
            if settings.checksum != "off":
                made["plugin, no checksum"] = Plugin(settings.model_copy(update={"checksum": "off"}))
            for contestant in made.values():
                stack.callback(contestant.close)
            return made

        contestants = contest(place.settings)
        moves = {n: measure_moves(contestants, place, n, given.rounds) for n in (4 << 20, 512 << 10)}
        lookers = {name: contestants[name] for name in ("raw obstore, 16 threads", "plugin", "boto3")}
        lookups = measure_lookups(place, lookers)
        proxy, behind = far_away(place, LATENCY)
        stack.callback(proxy.close)
        distant: dict[str, Contestant] = {"plugin": Plugin(behind), "boto3": Boto3(behind)}
        for contestant in distant.values():
            stack.callback(contestant.close)
        far = measure_lookups(place, distant)
        requests = measure_requests(place, prices)
        memory = measure_memory(place)
        told = contestants["plugin"]
        assert isinstance(told, Plugin)
        result["in force"] = told.storage.describe()
    lines = judge(moves, lookups, far)
    lines += [(f"memory over the buffers, {way}, MiB", n, "<= 64", n <= 64) for way, n in memory.items()]
    result |= {"moves": {str(n): found for n, found in moves.items()}, "lookups": lookups, "far lookups": far}
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
        f"server: {result['server']}; " + "; ".join(result["in force"][x] for x in ("reads", "writes"))
    )
    for nbytes, found in moves.items():
        table = Table(f"{PAGES} pages of {nbytes >> 10} KiB", "put MB/s", "CPU s/GB", "get MB/s", "CPU s/GB")
        for name, ways in found.items():
            table.add_row(
                name,
                *(f"{x:.{p}f}" for way in ("put", "get") for x, p in zip(ways[way], (0, 2), strict=True)),
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
