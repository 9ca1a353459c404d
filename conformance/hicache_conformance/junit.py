"""The report as JUnit XML, which every CI system can show."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from hicache_conformance.outcomes import Outcome
from hicache_conformance.report import CaseReport, Report

_NOT_XML = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def junit(report: Report) -> str:
    """One suite a group; unsupported and expected-fail are skipped, each with its reason."""
    root = ET.Element("testsuites", name=f"{report.suite}: {report.backend}", time=f"{report.seconds:.3f}")
    for group in report.groups:
        cases = [case for case in report.cases if case.group == group]
        suite = ET.SubElement(
            root,
            "testsuite",
            name=f"{report.backend}.{group}",
            tests=str(len(cases)),
            failures=str(report.count(Outcome.FAIL, group)),
            errors="0",
            skipped=str(sum(case.outcome in (Outcome.UNSUPPORTED, Outcome.EXPECTED_FAIL) for case in cases)),
            time=f"{sum(case.seconds for case in cases):.3f}",
            timestamp=report.started,
        )
        for case in cases:
            _add(suite, case, report)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _add(suite: ET.Element, case: CaseReport, report: Report) -> None:
    entry = ET.SubElement(
        suite,
        "testcase",
        name=case.name,
        classname=f"{report.backend}.{case.group}",
        time=f"{case.seconds:.3f}",
    )
    first, _, _ = case.message.partition("\n")
    if case.outcome is Outcome.FAIL:
        failure = ET.SubElement(entry, "failure", message=_clean(first))
        failure.text = _clean("\n".join([case.message, "", *case.history, "", case.replay]))
    elif case.outcome is not Outcome.PASS:
        ET.SubElement(entry, "skipped", message=_clean(f"{case.outcome.value}: {first}"))


def _clean(text: str) -> str:
    """Without the characters that no XML document may have."""
    return _NOT_XML.sub("?", text)
