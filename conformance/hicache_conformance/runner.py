"""Runs cases one after the other, each in a thread with a time limit: a hang is a fail, not a hang."""

from __future__ import annotations

import logging
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hicache_conformance.case import Case
from hicache_conformance.harness import Harness, missing
from hicache_conformance.history import History
from hicache_conformance.outcomes import BrokenPromiseError, Outcome, UnsupportedCaseError
from hicache_conformance.target import Target
from hicache_storage import Capabilities

CLOSE_SECONDS = 10.0
"""What a case may take to close its clients, on top of its own time."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one case."""

    case: Case
    outcome: Outcome
    seconds: float
    seed: int
    message: str = ""
    """Why, for every outcome but pass."""
    history: tuple[str, ...] = ()
    """What was done, for a fail."""


def run_case(case: Case, target: Target, capabilities: Capabilities, seed: int) -> Result:
    """Run one case in a thread of its own and in a directory of its own."""
    reason = missing(case.needs, capabilities, target)
    if reason is not None:
        return Result(case, Outcome.UNSUPPORTED, 0.0, seed, reason)
    tmp = Path(tempfile.mkdtemp(prefix="hicache-conformance-"))
    start = time.monotonic()
    harness = Harness(target, capabilities, case.name, seed, tmp)
    attempt = _Attempt(case, harness)
    log = _HistoryHandler(harness.history)
    logging.getLogger().addHandler(log)
    try:
        outcome, message = attempt.run()
    finally:
        logging.getLogger().removeHandler(log)
        shutil.rmtree(tmp, ignore_errors=True)
    history = tuple(harness.history.lines()) if outcome is Outcome.FAIL else ()
    return Result(case, outcome, time.monotonic() - start, seed, message, history)


def run_cases(
    cases: Sequence[Case], target: Target, capabilities: Capabilities, seed: int, xfail: Mapping[str, str]
) -> Iterator[Result]:
    """Run cases in order. ``xfail`` gives the reason for each case that is expected to fail."""
    for case in cases:
        yield judged(run_case(case, target, capabilities, seed), xfail.get(case.name))


def judged(result: Result, reason: str | None) -> Result:
    """The result in the light of the reason why the case is expected to fail, if it is."""
    if reason is None:
        return result
    if result.outcome is Outcome.FAIL:
        return replace(result, outcome=Outcome.EXPECTED_FAIL, message=f"{reason}\n{result.message}")
    if result.outcome is Outcome.PASS:
        message = f"unexpected pass: the xfail file says that it fails ({reason}); take the entry out"
        return replace(result, outcome=Outcome.FAIL, message=message)
    return result


class _Attempt:
    """One run of one case."""

    def __init__(self, case: Case, harness: Harness) -> None:
        self._case = case
        self._harness = harness
        self._verdict: tuple[Outcome, str] | None = None
        self._thread = threading.Thread(target=self._work, name=f"case-{case.name}", daemon=True)

    def run(self) -> tuple[Outcome, str]:
        self._thread.start()
        self._thread.join(self._case.seconds + CLOSE_SECONDS)
        if self._thread.is_alive():
            where = "closing" if self._verdict else "the case"
            return Outcome.FAIL, f"{where} did not end in time; it hangs here:\n{self._stack()}"
        assert self._verdict is not None
        return self._verdict

    def _work(self) -> None:
        verdict = self._attempt(self._run, "")
        self._verdict = verdict
        closing = self._attempt(self._harness.finish, "closing: ")
        if verdict[0] is Outcome.PASS:
            self._verdict = closing

    def _run(self) -> None:
        start = time.monotonic()
        self._case.run(self._harness)
        took = time.monotonic() - start
        if took > self._case.seconds:
            raise BrokenPromiseError(f"took {took:.1f} s; {self._case.seconds:.0f} s is the limit")

    def _attempt(self, step: object, prefix: str) -> tuple[Outcome, str]:
        assert callable(step)
        try:
            step()
        except UnsupportedCaseError as reason:
            return Outcome.UNSUPPORTED, str(reason)
        except BrokenPromiseError as error:
            return Outcome.FAIL, "\n".join([prefix + str(error), *getattr(error, "__notes__", ())])
        except BaseException as error:
            return Outcome.FAIL, f"{prefix}unforeseen {type(error).__name__}: {error}\n{_trace(error)}"
        return Outcome.PASS, ""

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)  # noqa: SLF001 - the one way to see where it hangs
        return "".join(traceback.format_stack(frame)[-8:]) if frame else "(it has just ended)"


class _HistoryHandler(logging.Handler):
    """Puts what the backend and the layers log among the events of the case."""

    def __init__(self, history: History) -> None:
        super().__init__(logging.WARNING)
        self._history = history

    def emit(self, record: logging.LogRecord) -> None:
        self._history.note(f"log: {record.getMessage()[:160]}")


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)[-8:])
