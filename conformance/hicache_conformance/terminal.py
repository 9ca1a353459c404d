"""What a person sees: a bar while the cases run, one table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_conformance.case import GROUPS, Case
from hicache_conformance.levels import REACHED
from hicache_conformance.matrix import Matrix
from hicache_conformance.outcomes import Outcome
from hicache_conformance.report import Report
from hicache_conformance.runner import Result

STYLES = {
    Outcome.PASS: "green",
    Outcome.FAIL: "bold red",
    Outcome.UNSUPPORTED: "dim",
    Outcome.EXPECTED_FAIL: "yellow",
}

SHOWN_LINES = 6


class Watch:
    """Shows a run as it goes: the bar, and each failure when it happens."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress = progress
        self._task = progress.add_task("starting", total=total)

    def begins(self, case: Case) -> None:
        """The case is running from now on."""
        self._progress.update(self._task, description=case.name)

    def ended(self, result: Result) -> None:
        """The case has this result."""
        self._progress.advance(self._task)
        if result.outcome is Outcome.FAIL:
            first, _, _ = result.message.partition("\n")
            self._progress.console.print(f"[bold red]fail[/] {result.case.name}: {escape(first)}")


@contextmanager
def watch(console: Console, total: int) -> Iterator[Watch]:
    """A live bar over ``total`` cases, on ``console``."""
    columns = (
        BarColumn(24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield Watch(progress, total)


def print_report(console: Console, report: Report) -> None:
    """Groups x outcomes, the levels, and for each failure the command that replays it."""
    table = Table(
        "group",
        "about",
        title=f"{report.backend} ({report.version}), seed {report.seed}",
        title_justify="left",
    )
    for outcome in Outcome:
        table.add_column(outcome.value, justify="right")
    for group in report.groups:
        counts = [(outcome, report.count(outcome, group)) for outcome in Outcome]
        cells = [f"[{STYLES[outcome]}]{count}[/]" if count else "[dim]0[/]" for outcome, count in counts]
        table.add_row(group, GROUPS[group].subject if group in GROUPS else "", *cells)
    table.add_section()
    table.add_row("all", f"{report.seconds:.1f} s", *(str(report.count(outcome)) for outcome in Outcome))
    console.print(table)
    for level, verdict in report.levels.items():
        style = "green" if verdict == REACHED else "dim" if verdict.startswith("un") else "yellow"
        console.print(f"  {level:<15}[{style}]{escape(verdict)}[/]", highlight=False)
    for failure in report.failures:
        console.print(f"\n[bold red]{failure.name}[/]", highlight=False)
        console.print("\n".join(_head(failure.message)), markup=False, highlight=False)
        console.print(f"again: {failure.replay}", markup=False, highlight=False, soft_wrap=True)
    if report.interrupted:
        console.print(
            f"\ninterrupted: {len(report.cases)} of {report.selected} cases ran", style="bold yellow"
        )


def _head(message: str) -> list[str]:
    """Enough of a message for a terminal; reports have all of it."""
    lines = message.splitlines()
    return lines if len(lines) <= SHOWN_LINES else [*lines[:SHOWN_LINES], "... (more in the reports)"]


def print_matrix(console: Console, matrix: Matrix) -> None:
    """Levels, totals, and the cases in which the backends differ or fail."""
    table = Table("", *matrix.backends)
    for level, verdicts in matrix.levels:
        table.add_row(level, *(escape(verdict) for verdict in verdicts))
    table.add_section()
    for outcome, counts in matrix.totals:
        table.add_row(outcome, *map(str, counts))
    table.add_section()
    for row in matrix.rows:
        if row.differs or any(cell and cell.outcome is Outcome.FAIL for cell in row.cells):
            cells = [
                f"[{STYLES[c.outcome]}]{c.outcome.value}[/]" if c else "[dim]not run[/]" for c in row.cells
            ]
            table.add_row(row.name, *cells)
    console.print(table)


def print_cases(console: Console, cases: list[Case]) -> None:
    """Every case with the first line of its promise."""
    for case in cases:
        first, _, _ = case.promise.partition("\n")
        needs = f" [dim](needs {', '.join(case.needs)})[/]" if case.needs else ""
        console.print(f"[bold]{case.name}[/]{needs}\n    {escape(first)}", highlight=False)
