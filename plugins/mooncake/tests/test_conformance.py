"""The whole conformance suite on a real master, with memory elsewhere and with memory of its own."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.wheel

pytest.importorskip("hicache_conformance", reason="the suite is not installed")

MODES = {"pure": {"global_segment_size": 0}, "embedded": {"global_segment_size": "512mb"}}


@pytest.fixture(scope="module")
def reports(tools, tmp_path_factory):
    """The suite at work in each mode, both at once; ``reports(mode)`` waits for its JSON report."""
    running, clusters = {}, []
    for mode, settings in MODES.items():
        directory = tmp_path_factory.mktemp(mode)
        cluster = tools.Cluster(directory / "mooncake.log")
        clusters.append(cluster)
        if mode == "pure":
            cluster.add_owner(512)
        report = directory / "report.json"
        given = [f"--set={key}={value}" for key, value in cluster.table(**settings).items()]
        command = [sys.executable, "-m", "hicache_conformance", "--backend", "mooncake", *given]
        running[mode] = report, subprocess.Popen([*command, "--json", str(report)], stdout=subprocess.DEVNULL)

    def wait(mode):
        report, process = running[mode]
        process.wait(280)
        return json.loads(report.read_text())

    yield wait
    for _, process in running.values():
        process.kill()
        process.wait()
    for cluster in clusters:
        cluster.close()


@pytest.mark.parametrize("mode", MODES)
def test_no_case_fails(reports, mode):
    failed = {case["name"]: case["message"] for case in reports(mode)["cases"] if case["outcome"] == "fail"}
    assert failed == {}


@pytest.mark.parametrize(
    ("mode", "lacking"), [("pure", set()), ("embedded", {"crash-safe"})], ids=["pure", "embedded"]
)
def test_every_level_that_applies_is_reached(reports, mode, lacking):
    levels = reports(mode)["levels"]
    assert {level for level, verdict in levels.items() if verdict != "reached"} == lacking
