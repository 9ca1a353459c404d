"""Mutant backends: each a reference store, or the SDK's layers over one, broken in one way.

They prove that the cases can fail: every case is claimed by at least one mutant, and each mutant
must fail every case that claims it. Most are real bugs of the field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import cleandoc
from typing import Any, TypeVar

from hicache_conformance.target import Layered, Target
from hicache_storage import HiCacheStorage
from hicache_storage.open import layered

MODULES = (
    "answers",
    "bytes_and_keys",
    "memory",
    "late",
    "identity",
    "files",
    "lifecycle",
    "capacity",
    "pools",
    "layers",
)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken backend and the cases that must notice."""

    name: str
    fault: str
    """What is wrong with it."""
    target: Target
    claimed_by: tuple[str, ...]


C = TypeVar("C", bound=type[HiCacheStorage])

_mutants: dict[str, Mutant] = {}


def mutant(*cases: str, stack: Layered = layered, table: Mapping[str, Any] | None = None) -> Callable[[C], C]:
    """Register the decorated backend as a mutant that each of ``cases`` must fail."""

    def register(cls: C) -> C:
        target = Target(f"{cls.__module__}:{cls.__name__}", table or {}, stack)
        _add(cls.__name__, cls.__doc__, target, cases)
        return cls

    return register


def stack_mutant(*cases: str, over: type[HiCacheStorage]) -> Callable[[Layered], Layered]:
    """Register the decorated way to put the layers on, over a sound backend."""

    def register(stack: Layered) -> Layered:
        target = Target(f"{over.__module__}:{over.__name__}", {}, stack)
        _add(stack.__name__, stack.__doc__, target, cases)
        return stack

    return register


def all_mutants() -> list[Mutant]:
    """Every mutant, in the order of definition."""
    for module in MODULES:
        import_module(f"hicache_conformance.mutants.{module}")
    return list(_mutants.values())


def _add(name: str, fault: str | None, target: Target, cases: tuple[str, ...]) -> None:
    if name in _mutants or not fault or not cases:
        raise ValueError(f"mutant {name} needs a name of its own, a docstring and a case that claims it")
    _mutants[name] = Mutant(name, cleandoc(fault), target, cases)
