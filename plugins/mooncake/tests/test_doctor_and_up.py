"""What an operator sees: what is missing, what to install, and a store to try."""

import signal
import subprocess
import sys
import types

import pytest

from hicache_storage import SettingsError, StorageError
from hicache_storage_mooncake import library
from hicache_storage_mooncake.doctor import doctor
from hicache_storage_mooncake.master import endpoints, parse_metrics
from hicache_storage_mooncake.settings import CONFIG_PATH, ENVIRONMENT

COMMAND = [sys.executable, "-c", "from hicache_storage.cli import main; main()", "mooncake"]


@pytest.mark.parametrize(
    ("installed", "problem", "said"),
    [
        ({}, "No module named 'mooncake'", "mooncake-cpu"),
        ({"mooncake-transfer-engine": "0.3.13"}, "libcuda.so.1: cannot open", "[mooncake-cpu]"),
        ({"mooncake-transfer-engine-non-cuda": "0.3.13"}, "libibverbs.so.1: cannot open", "libibverbs1"),
        ({"mooncake-transfer-engine-non-cuda": "0.3.13"}, "libcurl.so.4: cannot open", "libcurl4"),
        ({"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}, "x", "overwrite"),
    ],
)
def test_an_import_error_says_what_to_install(monkeypatch, installed, problem, said):
    monkeypatch.setattr(library, "wheels", lambda: installed)

    def fail(name):
        raise ImportError(problem)

    monkeypatch.setattr(library.importlib, "import_module", fail)
    with pytest.raises(library.MooncakeMissingError) as refusal:
        library.load()
    assert said in str(refusal.value)
    assert problem in str(refusal.value)
    assert isinstance(refusal.value, ImportError)
    assert isinstance(refusal.value, StorageError)


def test_a_version_that_is_too_old_is_refused(monkeypatch):
    old = types.SimpleNamespace(MooncakeDistributedStore=object)
    monkeypatch.setattr(library.importlib, "import_module", lambda name: old)
    with pytest.raises(library.MooncakeMissingError, match="too old"):
        library.load()


class Old:
    replica_num = 1
    with_soft_pin = False


def test_pins_follow_what_the_version_has():
    module = types.SimpleNamespace(ReplicateConfig=Old)
    made = library.replicate_config(module, replicas=2, soft_pin=True, hard_pin=False)
    assert (made.replica_num, made.with_soft_pin) == (2, True)
    with pytest.raises(SettingsError, match="hard_pin"):
        library.replicate_config(module, replicas=1, soft_pin=False, hard_pin=True)


def test_the_doctor_finds_both_wheels_and_a_dead_master(monkeypatch, tools):
    both = {"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"}
    monkeypatch.setattr(library, "wheels", lambda: both)
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "rdma")
    monkeypatch.setenv("MOONCAKE_MASTER", f"127.0.0.1:{tools.free_port()}")
    found = {what: (ok, message) for what, ok, message in doctor()}
    assert not found["mooncake wheels"][0]
    assert not found["master"][0]
    assert "does not answer" in found["master"][1]
    assert {"rdma devices", "locked memory"} <= set(found)


def test_the_doctor_finds_nothing_wrong_where_nothing_is_configured(monkeypatch):
    for name in (*ENVIRONMENT, CONFIG_PATH):
        monkeypatch.delenv(name, raising=False)
    *_, (what, ok, message) = doctor()
    assert (what, ok) == ("master", True)
    assert "MOONCAKE_MASTER" in message


def test_addresses_of_all_kinds_are_read():
    assert endpoints("10.0.0.1:50051") == [("10.0.0.1", 50051)]
    assert endpoints("etcd://a:1;b:2") == [("a", 1), ("b", 2)]
    assert endpoints("http://h/metadata") == [("h", 80)]
    assert endpoints("[::1]:7") == [("::1", 7)]
    for wrong in ("10.0.0.1", "a:b", ":1", "a:99999", ""):
        with pytest.raises(SettingsError):
            endpoints(wrong)


def test_metrics_with_labels_and_comments_are_skipped():
    assert parse_metrics(["# HELP a b", "a 1", 'b{x="y"} 2', "c 1.5e3", "d", "e x"]) == {
        "a": 1.0,
        "c": 1500.0,
    }


@pytest.mark.wheel
def test_up_prints_settings_that_work_and_ends_on_ctrl_c(tools, tmp_path):
    port, metrics = tools.free_port(), tools.free_port()
    flags = ["--port", str(port), "--metrics-port", str(metrics), "--store", "16mb"]
    up = subprocess.Popen(
        [*COMMAND, "up", *flags, "--log", str(tmp_path / "log")], stdout=subprocess.PIPE, text=True
    )
    try:
        said = [up.stdout.readline() for _ in range(5)]
        assert '"global_segment_size": 0' in "".join(said)
        child = subprocess.run(
            [*COMMAND, "doctor", f"--master=127.0.0.1:{port}", f"--metrics-port={metrics}", "--protocol=tcp"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert child.returncode == 0, child.stdout
        assert "clients 1" in child.stdout
        up.send_signal(signal.SIGINT)
        assert up.wait(15) == 0
        assert "stopped" in up.stdout.read()
    finally:
        up.kill()
        up.wait()
        up.stdout.close()
    with pytest.raises(ConnectionRefusedError):
        __import__("socket").create_connection(("127.0.0.1", port), 1)


@pytest.mark.wheel
def test_up_on_a_port_in_use_says_so(cluster, tools):
    flags = ["--port", str(cluster.port), "--metrics-port", str(tools.free_port())]
    up = subprocess.run([*COMMAND, "up", *flags], capture_output=True, text=True, timeout=60, check=False)
    assert up.returncode == 2
    assert str(cluster.port) in up.stderr


@pytest.mark.wheel
def test_up_runs_a_command_that_finds_the_store_and_ends_with_its_status(tools):
    flags = [f"--port={tools.free_port()}", f"--metrics-port={tools.free_port()}", "--store=16mb"]
    script = """
from hicache_storage import Namespace
from hicache_storage_mooncake import MooncakeSettings, MooncakeStorage
with MooncakeStorage(MooncakeSettings(), Namespace()) as storage:
    storage.set("a/b", memoryview(b"there"))
    print(bytes(storage.get("a/b")).decode())
raise SystemExit(3)
"""
    command = [*COMMAND, "up", *flags, "--", sys.executable, "-c", script]
    up = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (up.returncode, up.stdout) == (3, "there\n"), up.stderr


@pytest.mark.wheel
def test_up_says_when_its_command_cannot_be_run(tools):
    flags = [f"--port={tools.free_port()}", f"--metrics-port={tools.free_port()}", "--store=0"]
    command = [*COMMAND, "up", *flags, "--", "no-such-command"]
    up = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert up.returncode == 2
    assert "no-such-command" in up.stderr
