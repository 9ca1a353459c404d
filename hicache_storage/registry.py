"""Finds backends: installed ones by entry point, any other by ``module:Class``.

A plugin is a distribution with an entry point in the group ``hicache_storage.backends``; there is
no list of names anywhere in the SDK.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from hicache_storage.errors import SettingsError
from hicache_storage.storage import Capabilities, HiCacheStorage

GROUP = "hicache_storage.backends"
FAMILIES = "hicache_storage.families"
"""Entry points that make a backend class from what follows a colon, such as ``sglang:file``."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What ``hicache-storage backends`` shows of an installed backend."""

    name: str
    distribution: str
    version: str
    capabilities: Capabilities | None
    problem: str = ""
    """Why the backend cannot be loaded, when it cannot."""


def installed() -> list[BackendInfo]:
    """All installed backends, those that do not load included, by name."""
    return [_inspect(point) for point in sorted(entry_points(group=GROUP), key=lambda point: point.name)]


def find_backend(name: str) -> type[HiCacheStorage]:
    """The backend class called ``name``: an installed backend, or ``module:Class``.

    Raises SettingsError saying what is installed, or what is wrong with the module.
    """
    for point in entry_points(group=GROUP):
        if point.name == name:
            return _check(_load(point), name)
    family, colon, rest = name.partition(":")
    for point in entry_points(group=FAMILIES):
        if colon and point.name == family:
            make: Callable[[str], object] = _load(point)
            return _check(make(rest), name)
    if colon:
        return _check(_import(family, rest), name)
    names = [point.name for point in entry_points(group=GROUP)]
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"installed are: {', '.join(sorted(names)) or 'none'}"
    raise SettingsError(f"no backend is called {name!r}; {hint} (or name a class as module:Class)")


def _inspect(point: EntryPoint) -> BackendInfo:
    distribution = point.dist.name if point.dist else "?"
    version = point.dist.version if point.dist else "?"
    try:
        backend = _check(_load(point), point.name)
    except SettingsError as error:
        return BackendInfo(point.name, distribution, version, None, str(error))
    return BackendInfo(point.name, distribution, version, backend.capabilities)


def _load(point: EntryPoint) -> Callable[[str], object]:
    try:
        loaded: Callable[[str], object] = point.load()
    except Exception as error:
        raise SettingsError(f"{point.name!r} ({point.value}) does not load: {error}") from error
    return loaded


def _import(module: str, attribute: str) -> object:
    if not module or not attribute:
        raise SettingsError(f"{module}:{attribute} names no class; a class is named module:Class")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))  # as `python -m` does: the author's file lies beside him
    try:
        loaded = importlib.import_module(module)
    except ImportError as error:
        raise SettingsError(f"module {module!r} cannot be imported: {error}") from error
    if not hasattr(loaded, attribute):
        near = get_close_matches(attribute, dir(loaded), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise SettingsError(f"module {module!r} has no {attribute!r}{hint}")
    return getattr(loaded, attribute)


def _check(found: object, name: str) -> type[HiCacheStorage]:
    if not (isinstance(found, type) and issubclass(found, HiCacheStorage)):
        raise SettingsError(f"{name!r} is not a subclass of hicache_storage.HiCacheStorage")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise SettingsError(f"{name!r} lacks {', '.join(missing)}")
    return found
