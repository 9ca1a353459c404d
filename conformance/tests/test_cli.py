"""One command: what it selects, what it writes, and how it ends."""

import json
import os
import signal
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest

from hicache_conformance import cli
from hicache_conformance.cli import main

SOUND = "hicache_conformance.reference:ReferenceStorage"
BROKEN = "hicache_conformance.mutants.answers:StoresNothing"


def command(*arguments):
    """Run the command in this process; its exit status."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["hicache-conformance", *map(str, arguments)])
            main()
    except SystemExit as exit_:
        return exit_.code or 0
    return 0


def test_a_sound_backend_ends_with_status_0(capsys):
    assert command("--backend", SOUND, "--group", "contract", "--seed", "1") == 0
    out = capsys.readouterr().out
    assert "contract" in out
    assert "unsupported" in out


def test_a_failure_ends_with_status_1_and_the_command_that_replays_it(capsys):
    assert command("--backend", BROKEN, "--case", "contract.round_trip", "--seed", "7") == 1
    out = capsys.readouterr().out
    assert "get finds nothing after set" in out
    assert f"hicache-conformance --backend {BROKEN} --case contract.round_trip --seed 7" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--case", "contract.round_trp"], "did you mean contract.round_trip"),
        (["--case", "bit_flp"], "bit_flip"),
        (["--group", "contrct"], "did you mean contract"),
        (["--set", "rot=/x"], "unknown setting 'rot'"),
        (["--set", "nonsense"], "not of the form key=value"),
    ],
)
def test_a_wrong_question_ends_with_status_2_and_the_nearest_names(capsys, arguments, message):
    assert command("--backend", SOUND, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_backend_that_cannot_start_ends_with_status_2(capsys):
    assert command("--backend", "no.such.module:Storage") == 2
    assert "cannot be imported" in capsys.readouterr().err
    assert command() in (0, 2)


def test_list_shows_every_case_with_its_promise(capsys):
    assert command("--list") == 0
    out = capsys.readouterr().out
    assert "zero-copy.late_write_after_a_hit" in out
    assert "needs bounded" in out


def test_the_reports_say_the_same(tmp_path, capsys):
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html", "junit")}
    options = [word for kind, path in files.items() for word in (f"--{kind}", path)]
    assert command("--backend", BROKEN, "--group", "contract", "--seed", "3", *options) == 1

    report = json.loads(files["json"].read_text())
    assert report["seed"] == 3
    assert report["backend"] == BROKEN
    assert report["capabilities"]["zero_copy"] is False
    assert report["levels"]["core"].startswith("not reached")
    by_name = {case["name"]: case for case in report["cases"]}
    failed = by_name["contract.round_trip"]
    assert failed["outcome"] == "fail"
    assert any("set(" in event for event in failed["history"])
    assert "sglang#32503" in failed["issues"]

    suite = ET.fromstring(files["junit"].read_text())
    assert len(suite.findall(".//testcase")) == len(report["cases"])
    assert len(suite.findall(".//failure")) == sum(c["outcome"] == "fail" for c in report["cases"])
    assert len(suite.findall(".//skipped")) == sum(c["outcome"] == "unsupported" for c in report["cases"])

    page = files["html"].read_text()
    assert "get finds nothing after set" in page
    assert failed["replay"] in page.replace("&#39;", "'")
    assert "src=" not in page
    assert 'href="http' not in page


def test_secrets_are_masked(tmp_path, plugin_path, capsys):
    (plugin_path / "vault.py").write_text(
        "from pydantic import BaseModel, SecretStr\n"
        "from hicache_conformance.reference import ReferenceStorage\n"
        "class VaultSettings(BaseModel):\n"
        "    api_key: str\n"
        "    pin: SecretStr\n"
        "    region: str = 'eu'\n"
        "class Vault(ReferenceStorage):\n"
        "    Settings = VaultSettings\n"
    )
    settings = ["--set", "api_key=hunter2", "--set", "pin=4711x", "--set", "region=us"]
    out = tmp_path / "out.json"
    assert command("--backend", "vault:Vault", *settings, "--case", "contract.round_trip", "--json", out) == 0
    text = out.read_text()
    assert "hunter2" not in text
    assert "4711x" not in text
    assert "region=us" in text


def test_an_expected_failure_is_neither_a_fail_nor_a_pass(tmp_path, capsys):
    xfail = tmp_path / "xfail.toml"
    xfail.write_text('"contract.round_trip" = "it stores nothing, see our issue 17"\n')
    out = tmp_path / "out.json"
    options = ["--case", "contract.round_trip", "--xfail", xfail, "--json", out]
    assert command("--backend", BROKEN, *options) == 0
    [case] = json.loads(out.read_text())["cases"]
    assert case["outcome"] == "expected-fail"
    assert case["message"].startswith("it stores nothing, see our issue 17")
    assert json.loads(out.read_text())["levels"]["core"].startswith("not reached")


def test_an_unexpected_pass_fails_the_run(tmp_path, capsys):
    xfail = tmp_path / "xfail.yaml"
    xfail.write_text("contract.round_trip: it did not work last year\n")
    assert command("--backend", SOUND, "--case", "contract.round_trip", "--xfail", xfail) == 1
    assert "unexpected pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [('"contract.no_such" = "x"', "no case"), ('"contract.round_trip" = ""', "a reason is due")],
)
def test_a_wrong_entry_in_the_xfail_file_is_named(tmp_path, capsys, text, message):
    xfail = tmp_path / "xfail.toml"
    xfail.write_text(text)
    assert command("--backend", SOUND, "--xfail", xfail) == 2
    assert message in capsys.readouterr().err


def test_compare_sets_backends_side_by_side(tmp_path, capsys):
    paths = []
    for number, backend in enumerate((SOUND, BROKEN)):
        paths.append(tmp_path / f"{number}.json")
        command("--backend", backend, "--group", "contract", "--seed", "1", "--json", paths[-1])
    capsys.readouterr()
    page = tmp_path / "matrix.html"
    markdown = tmp_path / "matrix.md"
    assert command("compare", *paths, "--html", page, "--markdown", markdown) == 0
    assert f"## What `{BROKEN}` fails" in markdown.read_text()
    assert f"## What `{SOUND}` fails" not in markdown.read_text()
    out = capsys.readouterr().out
    assert "contract.round_trip" in out
    assert "contract.empty_batch" not in out, "rows in which nobody differs are left to the page"
    assert "contract.empty_batch" in page.read_text()


def test_compare_names_a_file_that_is_no_report(tmp_path, capsys):
    bad = tmp_path / "bad.json"
    bad.write_text('{"suite": 1}')
    assert command("compare", bad) == 2
    assert "no report of this suite" in capsys.readouterr().err


def test_ctrl_c_prints_what_is_done_so_far(tmp_path):
    waiting = tmp_path / "waiting"
    (tmp_path / "waits.py").write_text(
        "import pathlib, time\n"
        "from hicache_conformance.reference import ReferenceStorage\n"
        "class Waits(ReferenceStorage):\n"
        "    def batch_exists(self, keys):\n"
        f"        pathlib.Path({str(waiting)!r}).touch()\n"
        "        time.sleep(60)\n"
    )
    run = subprocess.Popen(
        [sys.executable, "-m", "hicache_conformance", "--backend", "waits:Waits", "--group", "contract"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    while not waiting.exists():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=20)
    assert run.returncode == 130
    assert "interrupted: " in out


def test_a_hanging_backend_is_a_fail_and_no_hang(plugin_path, monkeypatch, capsys):
    (plugin_path / "hangs.py").write_text(
        "import threading\n"
        "from hicache_conformance.reference import ReferenceStorage\n"
        "class Hangs(ReferenceStorage):\n"
        "    def exists(self, key):\n"
        "        threading.Event().wait(60)\n"
    )
    monkeypatch.setattr("hicache_conformance.runner.CLOSE_SECONDS", 0.2)
    original = cli.select
    monkeypatch.setattr(cli, "select", lambda *a: [_hurried(case) for case in original(*a)])
    assert command("--backend", "hangs:Hangs", "--case", "contract.missing_key") == 1
    out = capsys.readouterr().out
    assert "did not end in time; it hangs here" in out


def _hurried(case):
    from dataclasses import replace

    return replace(case, seconds=0.3)
