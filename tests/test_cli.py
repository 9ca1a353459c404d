"""The command: what a new user types, and what he is told when he mistypes."""

import json
import shlex
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hicache_storage import SettingsError
from hicache_storage.cli.app import app
from hicache_storage.sglang.launch_args import launch_args


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from hicache_storage.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_backends_lists_what_is_installed_with_versions_and_capabilities():
    done = CliRunner().invoke(app, ["backends"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    assert "file" in done.output
    assert "hicache-storage-file" in done.output
    assert "zero_copy" in done.output


def test_the_version_is_printed():
    assert run("--version").stdout.startswith("hicache-storage 0.")


def test_a_mistyped_command_gets_a_suggestion_and_status_2():
    done = run("replya")
    assert done.returncode == 2
    assert "replay" in done.stderr


def test_a_settings_error_is_one_line_without_a_traceback():
    done = run("launch-args", "fiel")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "hicache-storage: no backend is called 'fiel'; did you mean 'file'? (or name a class as module:Class)"
    ]


def test_launch_args_print_flags_that_sglangs_parser_reads_back():
    done = run("launch-args", "file", "--set", "root=/nvme/my kv", "--set", "epoch=3")
    assert done.returncode == 0
    words = shlex.split(done.stdout.replace("\\\n", " "))
    flags = dict(word.split("=", 1) for word in words if "=" in word)
    assert flags["--hicache-storage-backend"] == "dynamic"
    extra = json.loads(flags["--hicache-storage-backend-extra-config"])
    assert extra == {
        "backend_name": "file",
        "module_path": "hicache_storage.sglang",
        "class_name": "HiCacheBackend",
        "interface_v1": 1,
        "root": "/nvme/my kv",
        "epoch": 3,
    }


@pytest.mark.parametrize(
    ("settings", "version", "says"),
    [
        ({"rot": "/x"}, None, "did you mean 'root'"),
        ({"root": "/x"}, "0.4.9", "older than 0.5.10"),
        ({"root": "/x"}, "newest", "not a version"),
    ],
)
def test_launch_args_refuse_what_would_fail_at_start_up(settings, version, says):
    with pytest.raises(SettingsError, match=says):
        launch_args("file", settings, version)


def test_launch_args_know_the_supported_versions():
    for version in ("0.5.10.post1", "v0.5.14", "0.5.23"):
        assert "--enable-hierarchical-cache" in launch_args("file", {"root": "/x"}, version)


def test_the_doctor_looks_at_every_plugin_and_fails_when_something_is_wrong(monkeypatch):
    fine = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert "backend file" in fine.output
    monkeypatch.setattr("hicache_storage.cli.doctor.ENOUGH_DESCRIPTORS", 1 << 62)
    bad = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert bad.exit_code == 1
    assert "ulimit -n" in bad.output
