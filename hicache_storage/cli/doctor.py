"""`hicache-storage doctor`: whether this machine can run what is installed.

Plugins add findings by the entry point group below: a function without arguments that returns
(what, fine, what was found or what to do) for each thing it looked at.
"""

from __future__ import annotations

import platform
import resource
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TypeAlias

import typer
from rich.console import Console
from rich.table import Table

from hicache_storage import __version__
from hicache_storage.registry import installed

DOCTOR = "hicache_storage.doctor"

Finding: TypeAlias = tuple[str, bool, str]

ENOUGH_DESCRIPTORS = 4096

_OPTIONAL = {
    "torch": "the engine",
    "transformers": "time to first token in bench tiers",
    "triton": "io_backend kernel on a CUDA device",
    "sglang": "sglang:<name> backends",
}


def doctor() -> None:
    """Check this machine: versions, limits, plugins. Exit status 1 when something is wrong."""
    findings = [*_versions(), *_limits(), *_plugins()]
    table = Table("", "what", "found")
    for what, fine, found in findings:
        table.add_row("[green]ok[/green]" if fine else "[red]bad[/red]", what, found)
    Console().print(table)
    if not all(fine for _, fine, _ in findings):
        raise typer.Exit(1)


def _versions() -> Iterator[Finding]:
    yield "python", True, platform.python_version()
    yield "hicache-storage", True, __version__
    for name, needed_by in _OPTIONAL.items():
        try:
            yield name, True, version(name)
        except PackageNotFoundError:
            yield name, True, f"not installed; only {needed_by} would need it"


def _limits() -> Iterator[Finding]:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield (
        "open files",
        soft >= ENOUGH_DESCRIPTORS,
        f"{soft} allowed"
        + ("" if soft >= ENOUGH_DESCRIPTORS else f"; ulimit -n {ENOUGH_DESCRIPTORS} or more"),
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    shown = "no limit" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
    yield "locked memory", True, f"{shown}; RDMA needs as much as L2 and its segments"


def _plugins() -> Iterator[Finding]:
    for info in installed():
        if info.capabilities is None:
            yield f"backend {info.name}", False, info.problem
        else:
            yield f"backend {info.name}", True, f"{info.distribution} {info.version}"
    for point in sorted(entry_points(group=DOCTOR), key=lambda point: point.name):
        try:
            look: Callable[[], list[Finding]] = point.load()
            yield from ((f"{point.name}: {what}", fine, found) for what, fine, found in look())
        except Exception as error:
            yield f"{point.name}", False, f"its check does not run: {error}"
