"""hicache-storage verify, du, gc and clear."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from hicache_storage import Namespace
from hicache_storage.directory.commands import app
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage_file import FileSettings, FileStorage

OURS = Namespace(model="llama", page_size=64)
THEIRS = Namespace(model="qwen", tenant="acme")


@pytest.fixture
def command():
    def run(*arguments, **options):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
        result.text = " ".join(result.output.replace("│", " ").split())
        return result

    return run


@pytest.fixture
def filled(root, memory):
    page = memory.filled("page", 4096)
    for namespace, count in ((OURS, 20), (THEIRS, 10)):
        with IntegrityLayer(FileStorage(FileSettings(root=root, min_free=0), namespace)) as storage:
            keys = [namespace.key(f"page-{i:02}") for i in range(count)]
            assert all(storage.batch_set_from(keys, [page] * count))
    return root


def test_verify_passes_what_is_whole(filled, command):
    result = command("verify", filled)
    assert result.exit_code == 0
    assert "30 pages, 240.0 KiB: 0 corrupt" in result.text


def test_verify_names_what_is_corrupt_and_removes_it_when_told(filled, command, tools):
    damaged = tools.pages_on_disk(filled)[3:9]
    damaged[0].write_bytes(b"short")
    damaged[1].write_bytes(bytes(8192))
    flipped = bytearray(damaged[2].read_bytes())
    flipped[5000] ^= 1
    damaged[2].write_bytes(flipped)
    flipped = bytearray(damaged[3].read_bytes())
    flipped[100] ^= 1
    damaged[3].write_bytes(flipped)
    shutil.copy(damaged[5], damaged[4])
    result = command("verify", filled)
    assert result.exit_code == 1
    for problem in ("no header", "wrong checksum", "padding", "stored under another name"):
        assert problem in result.text
    assert "30 pages" in result.text
    assert "5 corrupt" in result.text
    result = command("verify", filled, "--delete")
    assert result.exit_code == 0
    assert "5 of them removed" in result.text
    assert command("verify", filled).exit_code == 0
    assert len(tools.pages_on_disk(filled)) == 25


def test_du_shows_every_namespace_and_agrees_with_the_usage_file(filled, command):
    result = command("du", filled, env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert "model=llama, page_size=64" in result.text
    assert "model=qwen, tenant=acme" in result.text
    assert "30 pages, 240.0 KiB in 2 namespaces" in result.text
    assert "usage file" not in result.text


def test_du_says_when_the_usage_file_disagrees(filled, command, tools):
    tools.pages_on_disk(filled)[0].unlink()
    assert "usage file says 240.0 KiB" in command("du", filled).text


def test_gc_removes_by_age(filled, command, tools):
    for path in tools.pages_on_disk(filled)[:12]:
        os.utime(path, (time.time() - 8 * 86400,) * 2)
    result = command("gc", filled, "--older-than", "7d", "--dry-run")
    assert "would remove 12 pages" in result.text
    assert len(tools.pages_on_disk(filled)) == 30
    assert "removed 12 pages" in command("gc", filled, "--older-than", "7d").text
    assert len(tools.pages_on_disk(filled)) == 18


def test_gc_removes_the_oldest_down_to_a_size(filled, command, tools):
    old = tools.pages_on_disk(filled)[5:15]
    for path in old:
        os.utime(path, (time.time() - 1000,) * 2)
    result = command("gc", filled, "--to", "160KiB")
    assert result.exit_code == 0
    assert "removed 10 pages" in result.text
    assert not any(path.exists() for path in old)
    assert command("gc", filled, "--to", "1GB").text.endswith("removed 0 pages, 0 B")


def test_clear_takes_the_start_of_a_digest_and_asks_first(filled, command, tools):
    start = THEIRS.digest[:6]
    assert command("clear", filled, "--namespace", start, input="n\n").exit_code == 1
    assert len(tools.pages_on_disk(filled)) == 30
    assert "model=qwen" in command("clear", filled, "--namespace", start, input="n\n").text
    assert "removed 10 pages" in command("clear", filled, "--namespace", start, "--yes").text
    assert len(tools.pages_on_disk(filled)) == 20
    assert "removed 20 pages" in command("clear", filled, "--all", "--yes").text
    assert command("du", filled).exit_code == 0


def test_an_empty_directory_is_fine(tmp_path, command):
    for arguments in (["verify"], ["du"], ["gc", "--to", "1GB"], ["clear", "--all", "--yes"]):
        assert command(arguments[0], tmp_path, *arguments[1:]).exit_code == 0


def test_mistakes_are_explained(filled, command, tmp_path):
    typo = OURS.digest[:-2] + "zz"
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    for arguments, hint in (
        (["du", filled.with_name("stroe")], "did you mean"),
        (["du", tmp_path / "others"], "no HiCache pages"),
        (["du", tmp_path / "others" / "file"], "not a directory"),
        (["clear", filled, "--namespace", typo], f"did you mean {OURS.digest}"),
        (["clear", filled], "--namespace NAME and --all"),
        (["gc", filled], "--older-than AGE and --to SIZE"),
        (["gc", filled, "--older-than", "soon"], "is not an age"),
        (["gc", filled, "--to", "lots"], "is not a size"),
        (["gc", filled, "--to", "50%"], "takes a size"),
    ):
        result = command(*arguments, env={"COLUMNS": "400"})
        assert result.exit_code == 2, arguments
        assert hint in result.text, arguments


def test_a_page_that_cannot_be_removed_is_counted_and_shows_in_the_exit_status(filled, command, monkeypatch):
    def refuse(name, *, dir_fd, real=os.unlink):
        if name == "page-05":
            raise OSError(1, "Operation not permitted")
        real(name, dir_fd=dir_fd)

    monkeypatch.setattr("hicache_storage.directory.tree.os.unlink", refuse)
    result = command("clear", filled, "--all", "--yes")
    assert result.exit_code == 1
    assert "removed 28 pages" in result.text
    assert "2 pages could not be removed" in result.text


def test_it_runs_as_a_program_and_survives_ctrl_c(filled, tools):
    run = [sys.executable, "-c", "from hicache_storage.directory.commands import app; app()"]
    done = subprocess.run([*run, "verify", filled], capture_output=True, text=True, check=True, timeout=60)
    assert "0 corrupt" in done.stdout
    slow = (
        "import os, time, hicache_storage.directory.tree as tree; real = os.unlink\n"
        "def unlink(name, *, dir_fd): print(name, flush=True); time.sleep(0.01); real(name, dir_fd=dir_fd)\n"
        "tree.os.unlink = unlink\n"
        "from hicache_storage.directory.commands import app; app()"
    )
    clearing = subprocess.Popen(
        [sys.executable, "-c", slow, "clear", str(filled), "--all", "--yes"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    for _ in range(3):
        clearing.stdout.readline()
    clearing.send_signal(signal.SIGINT)
    clearing.communicate(timeout=30)
    assert clearing.returncode != 0
    left = len(tools.pages_on_disk(filled))
    assert 0 < left < 30
    done = subprocess.run([*run, "du", filled], capture_output=True, text=True, check=True, timeout=60)
    assert f"{left} pages" in done.stdout
