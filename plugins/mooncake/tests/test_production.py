"""The layout for production: masters that elect a leader, owners that spill to disk, SGLang's engine."""

import shutil
import subprocess
import time
from contextlib import ExitStack

import pytest

from hicache_storage_mooncake.master import answers
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


def test_pages_survive_the_leader_with_etcd_and_oplog(etcd, tools):
    from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
    from hicache_storage_mooncake.client import close_idle

    ha = [
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        f"--ha_backend_connstring={etcd}",
        "--enable_oplog=true",
    ]
    with ExitStack() as stack:
        masters = [start_ha_master(stack, tools, ha)]
        owner = stack.enter_context(start_owner(f"etcd://{etcd}", 64 << 20))
        masters.append(start_ha_master(stack, tools, ha, standby=True))
        stack.callback(close_idle)
        settings = MooncakeSettings(
            master_server_address=f"etcd://{etcd}", protocol="tcp", global_segment_size=0
        )
        storage = stack.enter_context(MooncakeStorage(settings, tools.NAMESPACE))
        key = tools.NAMESPACE.key("survivor")
        storage.set(key, memoryview(b"kept" * 1000))
        time.sleep(1.0)  # the standby follows the log; nothing says how far it is
        masters[0].kill()
        until(lambda: served(storage, key) == b"kept" * 1000, 40)
        assert owner.process.poll() is None


def start_ha_master(stack, tools, flags, standby=False):
    return stack.enter_context(start_master(tools.free_port(), tools.free_port(), *flags, standby=standby))


def served(storage, key):
    from hicache_storage import StorageError

    try:
        return storage.get(key)
    except StorageError:
        return None


def test_pages_on_disk_survive_their_owner(tools, tmp_path, log):
    disk = tmp_path / "ssd"
    disk.mkdir()
    environment = {
        "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "file_per_key_storage_backend",
        "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(64 << 20),
    }
    cluster = tools.Cluster(log, "--enable_offload=true")
    try:
        owner = cluster.add_owner(64, disk, **environment)
        storage = cluster.open()
        keys = tools.NAMESPACE.keys([f"disk-{i}" for i in range(4)])
        for key in keys:
            storage.set(key, memoryview(tools.content_of(key, 1 << 20)))
        until(lambda: sum(p.stat().st_size for p in disk.rglob("*") if p.is_file()) >= 4 << 20, 15)
        owner.kill()
        until(lambda: not any(storage.batch_exists(keys)), tools.CLIENT_TTL + 8)
        cluster.add_owner(64, disk, **environment)
        until(lambda: all(served(storage, key) == tools.content_of(key, 1 << 20) for key in keys), 20)
    finally:
        cluster.close()


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
