"""The conformance suite on files, in every way the POSIX plugin has, and on objects of an S3 server."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("hicache_conformance", reason="the suite is not installed")

BYTES_ONLY = ["--group=contract", "--group=content", "--group=zero-copy"]
"""The groups in which it matters how bytes get to the disk; the others ran in the sibling mode."""

FILES = {
    "aio, direct": ("use_aio", "auto", []),
    "uring, buffered": ("use_uring", "off", []),
    "aio, buffered": ("use_aio", "off", BYTES_ONLY),
    "uring, direct": ("use_uring", "auto", BYTES_ONLY),
}


@pytest.fixture(scope="module")
def reports(server, tmp_path_factory):
    """The suite at work in each mode, all at once; ``reports(mode)`` waits for its JSON report."""
    running = {}

    def start(mode, settings, more):
        report = tmp_path_factory.mktemp("suite") / "report.json"
        given = [f"--set={key}={value}" for key, value in settings.items()]
        command = [sys.executable, "-m", "hicache_conformance", "--backend", "nixl", *given, *more]
        running[mode] = (
            report,
            subprocess.Popen(
                [*command, "--json", str(report)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ),
        )

    files = {"plugin": "posix", "root": "{tmp}", "capacity": "4GB"}
    for mode, (way, direct_io, groups) in FILES.items():
        start(mode, {**files, "params": json.dumps({way: True}), "direct_io": direct_io}, groups)
    objects = {"plugin": "obj", "params": json.dumps(server.params())}
    start("objects", objects, [])

    def wait(mode):
        report, process = running[mode]
        process.wait(290)
        return json.loads(report.read_text())

    yield wait
    for _, process in running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("mode", [*FILES, "objects"])
def test_no_case_fails(reports, mode):
    cases = reports(mode)["cases"]
    assert len(cases) > 50
    failed = {case["name"]: case["message"] for case in cases if case["outcome"] == "fail"}
    assert failed == {}
