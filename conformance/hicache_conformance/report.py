"""The report: one record that every output is made of, and that can be read back."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

import hicache_conformance
import hicache_storage
from hicache_conformance.case import Case, all_cases
from hicache_conformance.levels import judge
from hicache_conformance.outcomes import Outcome
from hicache_conformance.runner import Result
from hicache_conformance.target import Target
from hicache_storage import Capabilities
from hicache_storage.namespace import SCHEMA_VERSION


class ReportError(ValueError):
    """A file that is no report of this suite."""


class CaseReport(BaseModel):
    """One case of a run."""

    model_config = ConfigDict(frozen=True)

    name: str
    group: str
    level: str
    outcome: Outcome
    seconds: float
    seed: int
    message: str = ""
    promise: str = ""
    issues: tuple[str, ...] = ()
    history: tuple[str, ...] = ()
    replay: str = ""
    """The command that runs just this case again with its seed."""


class Report(BaseModel):
    """One run of the suite over one backend."""

    model_config = ConfigDict(frozen=True)

    suite: str
    contract: str
    backend: str
    version: str
    settings: dict[str, Any]
    capabilities: dict[str, Any]
    environment: dict[str, str]
    seed: int
    started: str
    """When, in UTC."""
    seconds: float
    interrupted: bool
    selected: int
    """Cases that were to run; fewer are listed only when the run was interrupted."""
    levels: dict[str, str]
    cases: tuple[CaseReport, ...]

    def count(self, outcome: Outcome, group: str | None = None) -> int:
        """Cases with this outcome, in one group or in all."""
        return sum(c.outcome is outcome and group in (None, c.group) for c in self.cases)

    @property
    def failures(self) -> list[CaseReport]:
        """The cases that failed, unexpected passes included."""
        return [found for found in self.cases if found.outcome is Outcome.FAIL]

    @property
    def groups(self) -> list[str]:
        """The groups that have cases here, in the suite's order."""
        return list(dict.fromkeys(found.group for found in self.cases))


def make_report(
    target: Target,
    capabilities: Capabilities,
    results: Sequence[Result],
    selected: Sequence[Case],
    seed: int,
    started: datetime,
    *,
    arguments: Sequence[str],
    interrupted: bool = False,
) -> Report:
    """The report of a run. ``arguments`` are those that name the backend, for the replay commands."""
    cases = tuple(_case_report(result, arguments) for result in results)
    outcomes = {found.name: found.outcome for found in cases}
    return Report(
        suite=f"hicache-conformance {hicache_conformance.__version__}",
        contract=f"hicache-storage {hicache_storage.__version__}, schema {SCHEMA_VERSION}",
        backend=target.backend,
        version=target.version(),
        settings=target.shown(),
        capabilities=asdict(capabilities),
        environment=_environment(),
        seed=seed,
        started=started.astimezone(timezone.utc).isoformat(timespec="seconds"),
        seconds=(datetime.now(timezone.utc) - started).total_seconds(),
        interrupted=interrupted,
        selected=len(selected),
        levels=judge(all_cases(), outcomes, capabilities),
        cases=cases,
    )


def read_report(path: Path) -> Report:
    """The report in a JSON file. Raises ReportError that says what is wrong with it."""
    try:
        return Report.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ReportError(f"{path}: cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ReportError(f"{path} is no report of this suite: {where}: {first['msg']}") from None


def _case_report(result: Result, arguments: Sequence[str]) -> CaseReport:
    case = result.case
    command = ["hicache-conformance", *arguments, "--case", case.name, "--seed", str(result.seed)]
    return CaseReport(
        name=case.name,
        group=case.group,
        level=case.level,
        outcome=result.outcome,
        seconds=round(result.seconds, 4),
        seed=result.seed,
        message=result.message,
        promise=case.promise,
        issues=case.issues,
        history=result.history,
        replay=shlex.join(command),
    )


def _environment() -> dict[str, str]:
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cores": str(os.cpu_count()),
    }
