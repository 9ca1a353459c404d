"""The ``hicache-conformance`` command.

Exit status: 0 when nothing failed, 1 when something did, 2 when the question is wrong (a mistyped
case, bad settings, a backend that cannot start), 130 after Ctrl-C.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from hicache_conformance import __version__
from hicache_conformance.case import Case, SelectionError, select
from hicache_conformance.html import compare_page, report_page
from hicache_conformance.junit import junit
from hicache_conformance.markdown import compare_markdown
from hicache_conformance.matrix import compare as make_matrix
from hicache_conformance.report import Report, ReportError, make_report, read_report
from hicache_conformance.runner import Result, run_cases
from hicache_conformance.target import Target
from hicache_conformance.terminal import print_cases, print_matrix, print_report, watch
from hicache_conformance.xfail import read_xfail
from hicache_storage import Capabilities, SettingsError
from hicache_storage.settings import parse_assignments, read_table

INTERRUPTED = 130
WRONG_QUESTION = 2


class _RunByDefault(TyperGroup):
    """``hicache-conformance --backend ...`` is ``hicache-conformance run --backend ...``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "--version"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_RunByDefault,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Proves a HiCache storage backend right, from outside.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache-conformance {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Proves a HiCache storage backend right, from outside."""


@app.command()
def run(
    backend: Annotated[str, typer.Option(help="An installed backend, or module:Class.")] = "",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="A setting; {tmp} is a fresh directory.")
    ] = None,
    config: Annotated[
        str, typer.Option(metavar="@FILE", help="Settings: @file.json|toml|yaml, or JSON.")
    ] = "",
    case: Annotated[list[str] | None, typer.Option(metavar="GROUP.NAME", help="Run just this case.")] = None,
    group: Annotated[list[str] | None, typer.Option(help="Run just this group.")] = None,
    seed: Annotated[int | None, typer.Option(help="Repeat a run; default: a fresh one, printed.")] = None,
    xfail: Annotated[
        Path | None, typer.Option(help="Cases known to fail, with reasons (TOML, YAML).")
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML page.")] = None,
    junit_xml: Annotated[Path | None, typer.Option("--junit", help="Write the report as JUnit XML.")] = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and their promises.")] = False,
) -> None:
    """Run the suite over one backend."""
    console = Console()
    cases = select(case or (), group or ())
    if list_cases:
        print_cases(console, cases)
        return
    if not backend:
        raise SettingsError("name the backend to test: --backend file, or --backend module:Class")
    table = {**(read_table(config) if config else {}), **parse_assignments(settings or ())}
    target = Target(backend, table)
    reasons = read_xfail(xfail) if xfail else {}
    seed = random.randrange(1 << 31) if seed is None else seed
    outputs = [(json, _as_json), (html, report_page), (junit_xml, junit)]
    arguments = _arguments(target, settings or (), config)
    report = run_suite(target, cases, seed, reasons, console, arguments)
    for path, render in outputs:
        if path is not None:
            path.write_text(render(report), encoding="utf-8")
    print_report(console, report)
    raise typer.Exit(INTERRUPTED if report.interrupted else bool(report.failures))


@app.command("compare")
def compare_reports(
    reports: Annotated[list[Path], typer.Argument(help="JSON reports.")],
    html: Annotated[Path | None, typer.Option(help="Write the matrix as one HTML page.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the matrix as Markdown.")] = None,
) -> None:
    """Set reports of several backends side by side."""
    found = [read_report(path) for path in reports]
    matrix = make_matrix(found)
    print_matrix(Console(), matrix)
    if html is not None:
        html.write_text(compare_page(found, matrix), encoding="utf-8")
    if markdown is not None:
        markdown.write_text(compare_markdown(found), encoding="utf-8")


def run_suite(
    target: Target,
    cases: Sequence[Case],
    seed: int,
    xfail: Mapping[str, str],
    console: Console,
    arguments: Sequence[str],
) -> Report:
    """Run ``cases`` over ``target`` with a live bar; Ctrl-C ends it with what there is.

    Raises SettingsError when the backend cannot be opened.
    """
    capabilities = probe(target)
    started = datetime.now(timezone.utc)
    results: list[Result] = []
    interrupted = False
    try:
        with watch(console, len(cases)) as bar:
            for case in cases:
                bar.begins(case)
                results.extend(run_cases([case], target, capabilities, seed, xfail))
                bar.ended(results[-1])
    except KeyboardInterrupt:
        interrupted = True
    return make_report(
        target, capabilities, results, cases, seed, started, arguments=arguments, interrupted=interrupted
    )


def probe(target: Target) -> Capabilities:
    """What the backend says it can do. Raises SettingsError when it cannot be opened."""
    tmp = Path(tempfile.mkdtemp(prefix="hicache-conformance-"))
    try:
        return target.probe(tmp)
    except SettingsError:
        raise
    except Exception as error:
        raise SettingsError(
            f"backend {target.backend!r} cannot be opened: {type(error).__name__}: {error}"
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def main() -> None:
    """Run the command; what a user can mend is one line on stderr and exit status 2."""
    try:
        app()
    except (SelectionError, SettingsError, ReportError) as error:
        print(f"hicache-conformance: {error}", file=sys.stderr)
        sys.exit(WRONG_QUESTION)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _arguments(target: Target, settings: Sequence[str], config: str) -> list[str]:
    """The arguments that name the backend again, secrets masked."""
    shown = target.shown()
    words = ["--backend", target.backend]
    if config:
        words += ["--config", config if config.startswith("@") else "@FILE"]
    for assignment in settings:
        key = assignment.partition("=")[0]
        words += ["--set", f"{key}=***" if shown.get(key) == "***" else assignment]
    return words


def _as_json(report: Report) -> str:
    return report.model_dump_json(indent=2) + "\n"
