"""Several reports side by side: cases x backends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hicache_conformance.levels import LEVELS
from hicache_conformance.outcomes import Outcome
from hicache_conformance.report import CaseReport, Report


@dataclass(frozen=True, slots=True)
class Row:
    """One case over all backends; None where a report does not have it."""

    name: str
    cells: tuple[CaseReport | None, ...]

    @property
    def differs(self) -> bool:
        """Whether the backends' outcomes are not all the same."""
        return len({cell.outcome if cell else None for cell in self.cells}) > 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """What ``compare`` shows."""

    backends: tuple[str, ...]
    """A heading each: the backend, with its version where one backend appears twice."""
    levels: tuple[tuple[str, tuple[str, ...]], ...]
    totals: tuple[tuple[str, tuple[int, ...]], ...]
    rows: tuple[Row, ...]


def compare(reports: Sequence[Report]) -> Matrix:
    """The matrix of these reports, in their order; cases in the order in which they first appear."""
    names = dict.fromkeys(case.name for report in reports for case in report.cases)
    found = [{case.name: case for case in report.cases} for report in reports]
    short = [report.backend for report in reports]
    headings = [
        f"{report.backend} ({report.version})" if short.count(report.backend) > 1 else report.backend
        for report in reports
    ]
    return Matrix(
        backends=tuple(headings),
        levels=tuple((level, tuple(r.levels.get(level, "not judged") for r in reports)) for level in LEVELS),
        totals=tuple((o.value, tuple(r.count(o) for r in reports)) for o in Outcome),
        rows=tuple(Row(name, tuple(cases.get(name) for cases in found)) for name in names),
    )
