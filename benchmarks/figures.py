"""A measured figure, the bar it is held to, and the table that shows both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Line:
    """One measured figure and the bar it is held to."""

    name: str
    value: float
    unit: str
    bar: str = ""
    passed: bool | None = None
    """None where there is no bar."""


def table(lines: Sequence[Line]) -> Table:
    """The figures, each with its bar and whether that holds."""
    shown = Table("figure", "value", "bar", "")
    for line in lines:
        verdict = {True: "[green]holds", False: "[red]missed", None: ""}[line.passed]
        shown.add_row(line.name, f"{line.value:.2f} {line.unit}".strip(), line.bar, verdict)
    return shown
