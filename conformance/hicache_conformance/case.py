"""Cases: plain functions in groups, registered once and for all.

A case is registered by decorating it. There is no way to take one out or to put another in its
place: a second case of the same name is refused, and what runs is what this package defines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from inspect import cleandoc
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from hicache_conformance.harness import Harness

Run: TypeAlias = "Callable[[Harness], None]"


class SelectionError(ValueError):
    """A case or group that does not exist; the message has the nearest names."""


@dataclass(frozen=True, slots=True)
class Group:
    """Cases about one subject."""

    name: str
    subject: str
    level: str
    """The level that its cases count for, unless a case says otherwise."""
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """One promise and the function that tries to break it."""

    group: str
    name: str
    """``group.function``: what reports and ``--case`` call it."""
    run: Run
    level: str
    needs: tuple[str, ...]
    """Capabilities without which the case is unsupported; see ``harness.missing``."""
    seconds: float
    """Time the case may take; a case that takes longer has failed."""
    promise: str

    @property
    def issues(self) -> tuple[str, ...]:
        """The real failures that the promise comes from, such as ``sglang#29969``."""
        return tuple(dict.fromkeys(re.findall(r"[\w.-]+#\d+", self.promise)))


GROUPS: Mapping[str, Group] = MappingProxyType(
    {
        group.name: group
        for group in (
            Group("contract", "get, exists, set and their batches", "core", ("contract", "sizes", "threads")),
            Group("zero-copy", "page memory is used as promised", "core", ("zero_copy", "late_writes")),
            Group("identity", "no deployment reads another's pages", "core", ("identity",)),
            Group("content", "damaged objects are never served", "core", ("content",)),
            Group("lifecycle", "open, close, clear, reopen, fork, crash", "core", ("lifecycle", "crashes")),
            Group("capacity", "bounded, and right while evicting", "fault-tolerant", ("capacity",)),
            Group("faults", "the store's faults stop at the SDK", "fault-tolerant", ("outages", "faults")),
            Group("hybrid", "pages of several pools restore together", "hybrid", ("hybrid",)),
            Group("ranks", "ranks agree on what was hit", "multi-rank", ("ranks",)),
            Group("engine", "the reference tier engine, byte for byte", "core", ("engine",)),
            Group("stateful", "random programs against a model", "core", ("stateful",)),
        )
    }
)

_cases: dict[str, Case] = {}


def case(
    group: str, *, needs: Iterable[str] = (), level: str | None = None, seconds: float = 30.0
) -> Callable[[Run], Run]:
    """Register the decorated function as a case; its docstring is the promise."""

    def register(run: Run) -> Run:
        add_case(group, run.__name__, run, run.__doc__ or "", needs=needs, level=level, seconds=seconds)
        return run

    return register


def add_case(
    group: str,
    name: str,
    run: Run,
    promise: str,
    *,
    needs: Iterable[str] = (),
    level: str | None = None,
    seconds: float = 30.0,
) -> None:
    """Register a case that is made rather than written, such as one for each namespace field."""
    full = f"{group}.{name}"
    if full in _cases:
        raise ValueError(f"there is a case {full} already; cases cannot be replaced")
    if not promise.strip():
        raise ValueError(f"case {full} does not say what is promised")
    _cases[full] = Case(
        group, full, run, level or GROUPS[group].level, tuple(needs), seconds, cleandoc(promise)
    )


def all_cases() -> list[Case]:
    """Every case of the suite, in the order of groups and definition."""
    for group in GROUPS.values():
        for module in group.modules:
            import_module(f"hicache_conformance.cases.{module}")
    order = list(GROUPS)
    return sorted(_cases.values(), key=lambda found: order.index(found.group))


def select(names: Iterable[str] = (), groups: Iterable[str] = ()) -> list[Case]:
    """The cases of these names and groups together; all when both are empty.

    Raises SelectionError that gives the nearest names.
    """
    cases = all_cases()
    names, groups = list(names), list(groups)
    for group in groups:
        if group not in GROUPS:
            raise SelectionError(_unknown("group", group, list(GROUPS)))
    for name in names:
        if name not in _cases:
            raise SelectionError(_unknown("case", name, list(_cases)))
    if not names and not groups:
        return cases
    return [found for found in cases if found.name in names or found.group in groups]


def _unknown(kind: str, name: str, known: list[str]) -> str:
    short = {full.partition(".")[2] or full: full for full in known}
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    near += [short[match] for match in get_close_matches(name, list(short), n=3, cutoff=0.6)]
    hint = " or ".join(dict.fromkeys(near)) if near else f"one of {', '.join(known[:12])} (see --list)"
    return f"there is no {kind} {name!r}; did you mean {hint}?"
