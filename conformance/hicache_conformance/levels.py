"""Levels: what a run proves, computed from its outcomes and never claimed by anybody."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hicache_conformance.case import Case
from hicache_conformance.outcomes import Outcome
from hicache_storage import Capabilities

REACHED = "reached"

LEVELS: Mapping[str, tuple[str, ...]] = {
    "core": (),
    "zero-copy": ("zero_copy",),
    "crash-safe": ("persistent",),
    "fault-tolerant": (),
    "hybrid": (),
    "multi-rank": (),
}
"""Each level and the capabilities without which it is out of reach."""


def judge(
    cases: Sequence[Case], outcomes: Mapping[str, Outcome], capabilities: Capabilities
) -> dict[str, str]:
    """Each level's verdict: ``reached``, or why not.

    A level is reached when all its cases ran, at least one passed and none failed, expectedly or
    not; every level but core stands on core.
    """
    verdicts: dict[str, str] = {}
    for level, needs in LEVELS.items():
        verdict = _judge_one([case for case in cases if case.level == level], outcomes)
        lacking = [need for need in needs if not getattr(capabilities, need)]
        if lacking:
            verdict = f"unsupported: the backend does not declare {', '.join(lacking)}"
        elif verdict == REACHED and verdicts.get("core", REACHED) != REACHED:
            verdict = f"{verdicts['core'].partition(':')[0]}: core is not"
        verdicts[level] = verdict
    return verdicts


def _judge_one(cases: Sequence[Case], outcomes: Mapping[str, Outcome]) -> str:
    got = [outcomes.get(case.name) for case in cases]
    bad = sum(outcome in (Outcome.FAIL, Outcome.EXPECTED_FAIL) for outcome in got)
    if bad:
        return f"not reached: {bad} of {len(cases)} cases failed"
    if not cases or None in got:
        return f"not judged: {got.count(None)} of {len(cases)} cases did not run"
    if Outcome.PASS not in got:
        return "unsupported: no case applies"
    return REACHED
