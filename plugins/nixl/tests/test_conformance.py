"""The whole conformance suite on files, in every way the POSIX plugin has, and on objects of an S3 server."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("hicache_conformance", reason="the suite is not installed")

UNFIT = "capacity is refused: a bucket is bounded by its own lifecycle rules"
XFAIL = f'"capacity.an_object_larger_than_the_store" = "{UNFIT}"\n'


def failed_cases(tmp_path, settings, *more):
    report = tmp_path / "report.json"
    given = [f"--set={key}={value}" for key, value in settings.items()]
    command = [sys.executable, "-m", "hicache_conformance", "--backend", "nixl", *given, *more]
    subprocess.run([*command, "--json", str(report)], stdout=subprocess.DEVNULL, timeout=280, check=False)
    cases = json.loads(report.read_text())["cases"]
    assert len(cases) > 100
    return {case["name"]: case["message"] for case in cases if case["outcome"] == "fail"}


@pytest.mark.parametrize("direct_io", ["auto", "off"], ids=["direct", "buffered"])
@pytest.mark.parametrize("way", ["use_aio", "use_uring"])
def test_no_case_fails_on_files(tmp_path, way, direct_io):
    settings = {
        "plugin": "posix",
        "params": json.dumps({way: True}),
        "direct_io": direct_io,
        "root": "{tmp}",
        "capacity": "4GB",
    }
    assert failed_cases(tmp_path, settings) == {}


def test_no_case_fails_on_objects(tmp_path, server):
    xfail = tmp_path / "xfail.toml"
    xfail.write_text(XFAIL)
    settings = {"plugin": "obj", "params": json.dumps(server.params())}
    assert failed_cases(tmp_path, settings, "--xfail", str(xfail)) == {}
