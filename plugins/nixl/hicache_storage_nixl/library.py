"""NIXL's wheel: found and imported, or missed with a message that says what to install."""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hicache_storage import SettingsError

WHEELS = {"nixl-cu12": "nixl_cu12", "nixl-cu13": "nixl_cu13"}
"""Distributions that hold NIXL, and the packages they install."""

OLDEST = (1, 5)
"""Before it an agent cannot be told how to lock, and files that end early were reported as read."""

HOW = (
    "pip install hicache-storage-nixl[cu12] or [cu13], to match CUDA; "
    "without a GPU: pip install --no-deps nixl-cu12 is enough"
)


class NixlMissingError(SettingsError, ImportError):
    """NIXL cannot be imported; the message says what is missing and what to do."""


def wheels() -> dict[str, str]:
    """Installed distributions of NIXL, by name, with their versions."""
    found = {}
    for name in WHEELS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load() -> Any:
    """The module with ``nixl_agent`` in it. Raises NixlMissingError.

    With both wheels installed, the one whose CUDA is that of the torch which is loaded anyway.
    """
    installed = wheels()
    if not installed:
        raise NixlMissingError(f"NIXL is not installed: {HOW}")
    name = _fitting(installed)
    numbers = tuple(int(part) for part in installed[name].split(".")[:2] if part.isdigit())
    if numbers < OLDEST:
        raise NixlMissingError(f"{name} {installed[name]} is too old: {'.'.join(map(str, OLDEST))} is needed")
    try:
        return importlib.import_module(f"{WHEELS[name]}._api")
    except ImportError as error:
        raise NixlMissingError(f"{name} {installed[name]} cannot be imported ({error}): {HOW}") from error


def plugin_file(api: Any, plugin: str) -> Path | None:
    """The shared object of one of NIXL's plugins; None when this wheel does not have it."""
    package = Path(api.__file__).parent
    for directory in (f".{package.name}.mesonpy.libs/plugins", f"{package.name}.libs/nixl"):
        path = package.parent / directory / f"libplugin_{plugin}.so"
        if path.is_file():
            return path
    return None


def problem_with(api: Any, plugin: str) -> str:
    """Why one of NIXL's plugins cannot be loaded here, missing libraries by name; empty if it can.

    NIXL itself lists every plugin that it has a file for, loadable or not.
    """
    path = plugin_file(api, plugin)
    if path is None:
        return f"this wheel has no plugin {plugin}"
    try:
        ctypes.CDLL(str(path))
    except OSError as error:
        missing = _missing_libraries(path)
        return f"missing {', '.join(missing)}" if missing else str(error).replace(str(path), path.name)
    return ""


def _missing_libraries(path: Path) -> list[str]:
    """All of them: the loader itself names only the first."""
    try:
        said = subprocess.run(["ldd", str(path)], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603, S607
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"(\S+) => not found", said.stdout)


def _fitting(installed: dict[str, str]) -> str:
    if len(installed) > 1:
        try:
            cuda = version("torch").partition("+cu")[2] or version("nvidia-cuda-runtime")
        except PackageNotFoundError:
            cuda = ""
        if cuda.startswith("13"):
            return "nixl-cu13"
    return next(iter(installed))
