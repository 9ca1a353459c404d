"""The layout for production: masters that elect a leader, owners that spill to disk, SGLang's engine."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, closing

import pytest

from hicache_storage import SettingsError
from hicache_storage_mooncake.master import answers, parse_metrics, read_http
from hicache_storage_mooncake.processes import start_master, start_owner

pytestmark = pytest.mark.wheel


def until(holds, seconds):
    ends_at = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < ends_at, f"not within {seconds} s"
        time.sleep(0.1)


@pytest.fixture
def etcd(tools, tmp_path):
    """host:port of an etcd of one's own."""
    if shutil.which("etcd") is None:
        pytest.skip("etcd is not installed (Debian: etcd-server)")
    port, peer = tools.free_port(), tools.free_port()
    urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peer}"]
    flags = {
        "data-dir": str(tmp_path / "etcd"),
        "listen-client-urls": urls[0],
        "advertise-client-urls": urls[0],
        "listen-peer-urls": urls[1],
        "initial-advertise-peer-urls": urls[1],
        "initial-cluster": f"default={urls[1]}",
    }
    command = ["etcd", *(word for flag, value in flags.items() for word in (f"--{flag}", value))]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: answers(("127.0.0.1", port), 0.5), 10)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


CLIENT = """
import os, sys
from hicache_storage import Namespace, StorageError
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
settings = MooncakeSettings(master_server_address=sys.argv[1], protocol="tcp", global_segment_size=0)
storage = MooncakeStorage(settings, Namespace())
print("open", flush=True)
for line in sys.stdin:
    command, name = line.split()
    key, content = Namespace().key(name), name.encode() * 1000
    try:
        answer = storage.set(key, memoryview(content)) if command == "set" else storage.get(key) == content
    except StorageError as error:
        answer = error
    print(answer, flush=True)
os._exit(0)  # the end of a client takes 30 s where etcd elects the master
"""


class Elsewhere:
    """A client of elected masters in a process of its own: ``set NAME`` and ``get NAME``."""

    def __init__(self, address):
        command = [sys.executable, "-c", CLIENT, address]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout.readline() == "open\n"

    def __call__(self, command):
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def close(self):
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


def test_pages_survive_the_leader_with_etcd_and_oplog(etcd, tools):
    ha = [
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        f"--ha_backend_connstring={etcd}",
        "--enable_oplog=true",
        "--oplog_poll_interval_ms=50",
    ]
    metrics = tools.free_port()

    def followed():
        """How much of the leader's log the standby has."""
        try:
            text = read_http(f"http://127.0.0.1:{metrics}/metrics", 1.0)
        except OSError:
            return 0
        return parse_metrics(text.splitlines()).get("ha_oplog_applied_entries_total", 0)

    with ExitStack() as stack:
        leader = stack.enter_context(start_master(tools.free_port(), tools.free_port(), *ha))
        owner = stack.enter_context(start_owner(f"etcd://{etcd}", 64 << 20))
        stack.enter_context(start_master(tools.free_port(), metrics, *ha, standby=True))
        client = stack.enter_context(closing(Elsewhere(f"etcd://{etcd}")))
        until(followed, 10)
        before = followed()
        assert client("set survivor") == "None"
        assert client("set next") == "None"
        until(lambda: followed() >= before + 2, 10)  # one entry a page, in order
        leader.kill()
        until(lambda: client("get survivor") == "True", 40)
        assert owner.process.poll() is None


def served(storage, key):
    from hicache_storage import StorageError

    try:
        return storage.get(key)
    except StorageError:
        return None


SSD = {
    "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
}
"""Every page is written, and soon; by default nothing is before 256 MB are there."""


def nbytes_in(directory):
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_pages_on_disk_survive_their_owner(tools, tmp_path, log):
    disk = tmp_path / "ssd"
    disk.mkdir()
    cluster = tools.Cluster(log, "--enable_offload=true")
    try:
        owner = cluster.add_owner(64, disk, **SSD)
        storage = cluster.open()
        keys = tools.NAMESPACE.keys([f"disk-{i}" for i in range(4)])
        for key in keys:
            storage.set(key, memoryview(tools.content_of(key, 1 << 20)))
        until(lambda: nbytes_in(disk) >= 4 << 20, 15)
        owner.kill()
        until(lambda: not any(storage.batch_exists(keys)), tools.CLIENT_TTL + 8)
        cluster.add_owner(64, disk, **SSD)
        until(lambda: all(served(storage, key) == tools.content_of(key, 1 << 20) for key in keys), 20)
    finally:
        cluster.close()


SPILLS = """
import json, os, sys, time
from pathlib import Path
from hicache_storage import Namespace, SettingsError
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
from hicache_storage_mooncake.master import Master
disk, key = Path(sys.argv[2]), Namespace().key("spilled")
own = {"global_segment_size": "32mb", "enable_ssd_offload": True, "ssd_offload_path": disk}
settings = MooncakeSettings(**{**json.loads(sys.argv[1]), **own})
def opened():
    try:
        return MooncakeStorage(settings, Namespace())
    except SettingsError as error:
        print(error, flush=True)
        os._exit(0)
storage = opened()
storage.set(key, memoryview(bytes(1 << 20)))
ends_at = time.monotonic() + 15
while sum(f.stat().st_size for f in (disk / "rank_all").rglob("*") if f.is_file()) < 1 << 20:
    assert time.monotonic() < ends_at
    time.sleep(0.05)
print("spilled", flush=True)
sys.stdin.readline()
storage.close()
master = Master(settings.master_server_address, settings.master_metrics_port)
while master.counters()["capacity"]:  # what is read then comes from the disk
    assert time.monotonic() < ends_at
    time.sleep(0.05)
storage = opened()
print(storage.get(key) == bytes(1 << 20), flush=True)
os._exit(0)  # the end of a client that spills takes seconds
"""


def test_the_segment_of_a_server_spills_to_a_directory_of_its_own(tools, tmp_path, log):
    cluster = tools.Cluster(log, "--enable_offload=true")
    command = [sys.executable, "-c", SPILLS, json.dumps(cluster.table()), str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen(command, env={**os.environ, **SSD}, **pipes)
    try:
        assert server.stdout.readline() == "spilled\n"
        assert "another process spills" in cluster.elsewhere(SPILLS, str(tmp_path)).stdout
        assert server.communicate("close and open again\n", 20)[0] == "True\n"
    finally:
        server.kill()
        server.wait()
        cluster.close()


TENANTS = """
version: 1
tenants:
  - {name: red, quota: 64MB}
  - {name: blue, quota: 64MB}
"""


def test_tenants_of_the_master_do_not_see_each_other(tools, tmp_path, log):
    policy = tmp_path / "tenants.yaml"
    policy.write_text(TENANTS)
    cluster = tools.Cluster(log, "--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}")
    try:
        cluster.add_owner(64)
        red, blue = cluster.open(tenant_id="red"), cluster.open(tenant_id="blue")
        key = tools.NAMESPACE.key("theirs")
        red.set(key, memoryview(b"red"))
        assert blue.get(key) is None
        blue.set(key, memoryview(b"blue"))
        blue.clear()
        assert (red.get(key), blue.get(key)) == (b"red", None)
        with pytest.raises(SettingsError, match="knows no green"):
            cluster.open(tenant_id="green")
    finally:
        cluster.close()


def test_a_tenant_on_a_master_that_keeps_none_apart_is_refused(shared_cluster):
    with pytest.raises(SettingsError, match="--enable_multi_tenants=true"):
        shared_cluster.open(tenant_id="red")


def test_a_tenant_that_nobody_can_vouch_for_is_a_warning(shared_cluster, tools, caplog):
    shared_cluster.open(tenant_id="red", master_metrics_port=tools.free_port()).close()
    assert "tenant_id=red keeps nothing apart" in caplog.text


def test_the_engine_reloads_pages_from_mooncake(shared_cluster):
    pytest.importorskip("torch", reason="the reference engine needs torch")
    from hicache_storage.engine import KVShape, Source, TierEngine

    shape, page = KVShape.parse("mha:2x2x8:bf16"), 4

    def engine():
        storage = shared_cluster.stack()
        return TierEngine(
            shape,
            page,
            l1_tokens=16 * page,
            storage=storage,
            prefetch_policy="wait_complete",
            prefetch_threshold=page,
        )

    tokens = list(range(8 * page))
    with engine() as first:
        first.prefill(tokens)
        assert first.wait_for_backup(30)
    with engine() as second:
        waiting = second.prefetch(tokens)
        if waiting.operation is not None:
            waiting.operation.done.wait(10)
        report = second.prefill(tokens, waiting)
    assert report.wrong_bytes == 0
    assert report.pages(Source.L3) > 0
