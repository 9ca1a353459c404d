"""Settings come from a dict, a file or the environment, and a typo never passes."""

import pytest
from pydantic import BaseModel, ConfigDict, SecretStr

from hicache_storage import SettingsError
from hicache_storage.settings import environment_prefix, parse_assignments, read_table, split_settings


class Disk(BaseModel):
    model_config = ConfigDict(extra="forbid")
    root: str
    capacity: int = 1
    password: SecretStr = SecretStr("")


def split(table, environment=None):
    return split_settings(table, "disk", Disk, environment or {})


def test_one_table_carries_both_the_sdks_and_the_backends_settings():
    sdk, own = split({"root": "/x", "tenant": "t", "integrity": False})
    assert (sdk.tenant, sdk.integrity, own.root) == ("t", False, "/x")


@pytest.mark.parametrize(
    ("typo", "meant"), [("capasity", "capacity"), ("get_second", "get_seconds"), ("rot", "root")]
)
def test_a_typo_is_refused_with_what_was_meant(typo, meant):
    with pytest.raises(
        SettingsError, match=rf"unknown setting '{typo}' for backend 'disk'; did you mean.*'{meant}'"
    ):
        split({"root": "/x", typo: 1})


def test_an_unknown_key_that_resembles_nothing_lists_what_is_valid():
    with pytest.raises(SettingsError, match=r"valid are .*capacity.*root"):
        split({"root": "/x", "zzzzzz": 1})


def test_a_missing_or_wrong_value_names_its_key():
    with pytest.raises(SettingsError, match="root: Field required"):
        split({})
    with pytest.raises(SettingsError, match="capacity: Input should be a valid integer"):
        split({"root": "/x", "capacity": "lots"})


def test_secrets_are_never_shown():
    with pytest.raises(SettingsError) as caught:
        split({"root": 5, "password": "hunter2", "capacity": "hunter2"})
    assert "hunter2" not in str(caught.value)
    _, own = split({"root": "/x", "password": "hunter2"})
    assert "hunter2" not in repr(own)


def test_the_environment_fills_in_what_the_table_leaves_out():
    environment = {"HICACHE_DISK_ROOT": "/env", "HICACHE_DISK_CAPACITY": "7", "HICACHE_STORAGE_TENANT": "t"}
    sdk, own = split({"capacity": 9}, environment)
    assert (own.root, own.capacity, sdk.tenant) == ("/env", 9, "t")


def test_a_typo_in_the_environment_is_refused():
    with pytest.raises(SettingsError, match="HICACHE_DISK_ROTO; did you mean 'root'"):
        split({"root": "/x"}, {"HICACHE_DISK_ROTO": "/y"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("s.json", '{"root": "/x", "faults": {"seed": 3}}'),
        ("s.toml", 'root = "/x"\n[faults]\nseed = 3'),
        ("s.yaml", "root: /x\nfaults:\n  seed: 3"),
    ],
)
def test_a_file_is_read_by_its_suffix(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    sdk, own = split(read_table(f"@{tmp_path / name}"))
    assert own.root == "/x"
    assert sdk.faults is not None
    assert sdk.faults.seed == 3


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("s.json", "{", "line 1"),
        ("s.toml", "root = [\nx", "line 2"),
        ("s.yaml", "a: [", "line 1"),
        ("s.json", "[1]", "a table of settings is due, not list"),
        ("s.ini", "", "settings files end in .json, .toml"),
    ],
)
def test_a_malformed_file_is_refused_with_its_name(tmp_path, name, text, wrong):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(SettingsError, match=f"{name}.*{wrong}"):
        read_table(f"@{path}")


def test_a_missing_file_is_refused_with_its_name():
    with pytest.raises(SettingsError, match=r"nowhere\.toml: cannot be read"):
        read_table("@nowhere.toml")


def test_assignments_take_json_or_text():
    assert parse_assignments(["a=1", "b=x=y", 'c={"d": 2}', "e=true", "f="]) == {
        "a": 1,
        "b": "x=y",
        "c": {"d": 2},
        "e": True,
        "f": "",
    }
    with pytest.raises(SettingsError, match="key=value"):
        parse_assignments(["a"])


def test_a_backend_that_takes_any_setting_gets_what_is_not_the_sdks():
    class Open(BaseModel):
        model_config = ConfigDict(extra="allow")

    sdk, own = split_settings({"tenant": "t", "whatever": 1}, "sglang:file", Open, {})
    assert (sdk.tenant, own.model_extra) == ("t", {"whatever": 1})


def test_the_environment_prefix_of_a_class_is_a_name_a_shell_accepts():
    assert environment_prefix("my_pkg.mod:Store") == "HICACHE_MY_PKG_MOD_STORE_"
