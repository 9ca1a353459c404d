"""Pages for people: one file each, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, select_autoescape

from hicache_conformance.case import GROUPS
from hicache_conformance.matrix import Matrix
from hicache_conformance.outcomes import Outcome
from hicache_conformance.report import Report

_pages = Environment(
    loader=PackageLoader("hicache_conformance"),
    autoescape=select_autoescape(),
    trim_blocks=True,
    lstrip_blocks=True,
)


def report_page(report: Report) -> str:
    """Groups x outcomes, levels, failures with their history, then every case."""
    return _pages.get_template("report.html").render(report=report, outcomes=list(Outcome), subjects=GROUPS)


def compare_page(reports: Sequence[Report], matrix: Matrix) -> str:
    """Cases x backends."""
    return _pages.get_template("compare.html").render(reports=reports, matrix=matrix)
