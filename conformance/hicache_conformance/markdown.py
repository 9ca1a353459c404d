"""The matrix of several reports as a Markdown page, for a project's documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hicache_conformance.matrix import compare
from hicache_conformance.outcomes import Outcome
from hicache_conformance.report import CaseReport, Report


def compare_markdown(reports: Sequence[Report]) -> str:
    """Levels and totals of each backend, then what fails, in which case, and what that case promises."""
    return "\n".join(_lines(reports)) + "\n"


def _lines(reports: Sequence[Report]) -> Iterator[str]:
    matrix = compare(reports)
    yield from _row("", *(f"`{backend}`" for backend in matrix.backends))
    yield "|---|" + "---|" * len(matrix.backends)
    for level, verdicts in matrix.levels:
        yield from _row(level, *(verdict.partition(":")[0] for verdict in verdicts))
    for outcome, counts in matrix.totals:
        yield from _row(outcome, *map(str, counts))
    yield ""
    for report in reports:
        machine = ", ".join(f"{name} {value}" for name, value in report.environment.items())
        yield f"* `{report.backend}` {report.version}: {report.suite}, seed {report.seed}, {machine}"
    for report in reports:
        if report.failures:
            yield from ("", f"## What `{report.backend}` fails", "")
            for failure in report.failures:
                yield from _failure(failure)
    expected = [case for report in reports for case in report.cases if case.outcome is Outcome.EXPECTED_FAIL]
    if expected:
        yield from ("", "## Known and expected", "")
        for case in expected:
            yield f"* **{case.name}**: {_first(case.message)}"


def _failure(failure: CaseReport) -> Iterator[str]:
    issues = f" ({', '.join(failure.issues)})" if failure.issues else ""
    yield f"* **{failure.name}**: {_first(failure.promise)}{issues}"
    yield f"  <br>Found: {_first(failure.message)}"


def _first(text: str) -> str:
    line = text.strip().partition("\n")[0]
    return line.replace("|", "\\|").replace("<", "&lt;")


def _row(*cells: str) -> Iterator[str]:
    yield f"| {' | '.join(cells)} |"
