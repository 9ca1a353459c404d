"""SGLang's names and precedence; what Mooncake ignores or dies on is said before it starts."""

import json
import logging

import pytest

from hicache_storage import SettingsError
from hicache_storage.settings import split_settings
from hicache_storage_mooncake import MooncakeSettings, settings
from hicache_storage_mooncake.settings import CONFIG_PATH, ENVIRONMENT, HOSTNAMES, size_nbytes

MASTER = "10.0.0.1:50051"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch):
    for name in (*ENVIRONMENT, *HOSTNAMES, CONFIG_PATH):
        monkeypatch.delenv(name, raising=False)


def made(**table):
    return split_settings(table, "mooncake", MooncakeSettings, {})[1]


def refused(**table):
    with pytest.raises(SettingsError) as refusal:
        made(**{"master_server_address": MASTER, "protocol": "tcp", **table})
    return str(refusal.value)


def test_extra_config_of_sglang_is_taken_as_it_is(monkeypatch):
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.9:1")
    found = made(
        master_server_address=MASTER,
        local_hostname="node-1",
        metadata_server="http://10.0.0.1:8080/metadata",
        global_segment_size=4294967296,
        local_buffer_size=16777216,
        protocol="tcp",
    )
    assert found.master_server_address == MASTER
    assert found.global_segment_size == 4 << 30


def test_the_file_comes_before_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "mooncake.json"
    path.write_text(json.dumps({"master_server_address": "10.0.0.2:50051", "global_segment_size": "1gb"}))
    monkeypatch.setenv(CONFIG_PATH, str(path))
    monkeypatch.setenv("MOONCAKE_MASTER", "10.0.0.3:50051")
    monkeypatch.setenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", "2gb")
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    found = made()
    assert found.master_server_address == "10.0.0.2:50051"
    assert found.global_segment_size == 1 << 30
    assert found.protocol == "tcp"  # it only fills in what the file leaves out


def test_the_environment_alone_is_enough(monkeypatch):
    for name, value in {
        "MOONCAKE_MASTER": MASTER,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
        "MOONCAKE_MASTER_METRICS_PORT": "9100",
        "MOONCAKE_TENANT_ID": " ",
    }.items():
        monkeypatch.setenv(name, value)
    found = made()
    assert (found.master_server_address, found.global_segment_size) == (MASTER, 0)
    assert (found.master_metrics_port, found.tenant_id) == (9100, "default")


def test_the_host_name_of_the_environment_wins_everywhere(monkeypatch):
    monkeypatch.setenv("LOCAL_HOSTNAME", "node-7")
    assert made(master_server_address=MASTER, protocol="tcp", local_hostname="x").local_hostname == "node-7"
    monkeypatch.setenv("MOONCAKE_LOCAL_HOSTNAME", "node-8")
    assert made(master_server_address=MASTER, protocol="tcp").local_hostname == "node-8"


def test_no_master_names_all_three_places():
    with pytest.raises(SettingsError, match=f"master_server_address.*{CONFIG_PATH}.*MOONCAKE_MASTER"):
        made(protocol="tcp")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(CONFIG_PATH, str(tmp_path / "none.json"))
    with pytest.raises(SettingsError, match=r"none\.json"):
        made(protocol="tcp")


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [("4gb", 4 << 30), ("64MiB", 64 << 20), (0, 0), ("16777216", 16 << 20), ("2 tb", 2 << 40), ("1kb", 1024)],
)
def test_sizes_are_powers_of_1024_as_in_sglang(written, nbytes):
    assert size_nbytes(written) == nbytes


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"global_segment_sise": 0}, "global_segment_size"),
        ({"global_segment_size": "8mb"}, "16mb"),
        ({"global_segment_size": "four"}, "4gb"),
        ({"master_server_address": "10.0.0.1"}, "host:port"),
        ({"master_server_address": "redis://10.0.0.1:6379"}, "etcd"),
        ({"metadata_server": "redis://10.0.0.1:6379"}, "P2PHANDSHAKE"),
        ({"metadata_server": "nonsense"}, "P2PHANDSHAKE"),
        ({"protocol": "bogus"}, "tcp"),
        ({"standalone_storage": True}, "store services"),
        ({"client_server_address": "10.0.0.1:50052"}, "store services"),
        ({"extra_backend_tag": "team-a"}, "tenant"),
        ({"soft_pin": True, "hard_pin": True}, "exclude"),
        ({"enable_ssd_offload": True}, "ssd_offload_path"),
        ({"enable_ssd_offload": True, "ssd_offload_path": "/nowhere/at/all"}, "/nowhere/at/all"),
    ],
)
def test_what_mooncake_ignores_or_dies_on_is_refused(table, said):
    assert said in refused(**table)


def test_rdma_without_a_device_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "INFINIBAND", tmp_path / "none")
    assert "set protocol=tcp" in refused(protocol="rdma")
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(settings, "INFINIBAND", tmp_path)
    assert "there is no mlx5_9" in refused(protocol="rdma", device_name="mlx5_0,mlx5_9")
    assert made(master_server_address=MASTER, protocol="rdma", device_name="mlx5_0").device_name == "mlx5_0"


def test_rdma_is_the_default_as_in_sglang(tmp_path, monkeypatch):
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(settings, "INFINIBAND", tmp_path)
    assert made(master_server_address=MASTER).protocol == "rdma"


@pytest.mark.parametrize(
    "table", [{"device_name": "mlx5_0"}, {"ssd_offload_path": "/tmp"}, {"enable_group_semantics": True}]
)
def test_what_has_no_effect_is_a_warning(table, caplog):
    with caplog.at_level(logging.WARNING):
        made(master_server_address=MASTER, protocol="tcp", **table)
    assert next(iter(table)) in caplog.text
