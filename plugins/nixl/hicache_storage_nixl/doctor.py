"""Which of NIXL's plugins can be loaded on this machine, and which library the others lack."""

from __future__ import annotations

from hicache_storage_nixl import library
from hicache_storage_nixl.plugins import PLUGINS

Finding = tuple[str, bool, str]
"""What was checked, whether it is right, and what was found or what to do."""


def doctor() -> list[Finding]:
    """All findings. A plugin that is not loadable is no fault by itself; none at all is."""
    installed = library.wheels()
    named = ", ".join(f"{name} {version}" for name, version in installed.items())
    try:
        api = library.load()
    except library.NixlMissingError as error:
        return [("nixl wheel", False, str(error))]
    problems = {name: library.problem_with(api, plugin.nixl_name) for name, plugin in PLUGINS.items()}
    found = [(f"plugin {name}", True, problem or "loadable") for name, problem in problems.items()]
    usable = not all(problems.values())
    return [("nixl wheel", True, named), *found, ("storage plugins", usable, _summary(problems))]


def _summary(problems: dict[str, str]) -> str:
    loadable = [name for name, problem in problems.items() if not problem]
    return f"loadable: {', '.join(loadable) or 'none'}"
