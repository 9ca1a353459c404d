"""Mooncake's wheel: found, imported, or missed with a message that says what to install."""

from __future__ import annotations

import importlib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hicache_storage import SettingsError

WHEELS = {
    "mooncake-transfer-engine": "mooncake",
    "mooncake-transfer-engine-cuda13": "mooncake-cuda13",
    "mooncake-transfer-engine-non-cuda": "mooncake-cpu",
    "mooncake-transfer-engine-npu": "(none of ours)",
}
"""Distributions that own the directory ``mooncake/``, and the extra of this plugin that names each."""

SYSTEM_PACKAGES = {"libibverbs": "libibverbs1", "libnuma": "libnuma1", "libcurl": "libcurl4"}
"""Shared libraries that all wheels need, and the Debian packages that have them."""


class MooncakeMissingError(SettingsError, ImportError):
    """``mooncake.store`` cannot be imported; the message says which library is missing and what to do."""


def wheels() -> dict[str, str]:
    """Installed distributions of Mooncake, by name, with their versions."""
    found = ((str(d.metadata["Name"]).lower(), d.version) for d in distributions())
    return {name: version for name, version in found if name in WHEELS}


def load() -> Any:
    """The module ``mooncake.store``. Raises MooncakeMissingError."""
    try:
        store = importlib.import_module("mooncake.store")
    except ImportError as error:
        raise MooncakeMissingError(explain(str(error))) from error
    if not hasattr(store.MooncakeDistributedStore, "allocate_and_mount_segment"):
        raise MooncakeMissingError(
            f"Mooncake {', '.join(wheels().values()) or '?'} is too old: 0.3.13.post1 or newer is needed"
        )
    return store


def explain(problem: str) -> str:
    """What an ImportError of ``mooncake.store`` means, in words of what to install."""
    extras = "hicache-storage-mooncake[mooncake] (CUDA 12), [mooncake-cuda13] or [mooncake-cpu] (no GPU)"
    installed = wheels()
    if len(installed) > 1:
        return (
            f"{' and '.join(installed)} are both installed and overwrite each other's files ({problem}): "
            f"pip uninstall both, then install one of {extras}"
        )
    if not installed:
        return f"the package mooncake is not installed ({problem}): pip install {extras}"
    for library, package in SYSTEM_PACKAGES.items():
        if library in problem:
            return f"Mooncake needs a system library ({problem}): apt-get install {package}"
    if "libcu" in problem or "libnv" in problem:
        return (
            f"{next(iter(installed))} is built for CUDA, and this machine lacks it ({problem}): "
            "uninstall it and pip install hicache-storage-mooncake[mooncake-cpu], "
            "or [mooncake-cuda13] where CUDA 13 is installed"
        )
    return f"{next(iter(installed))} cannot be imported ({problem})"


def binary(name: str) -> Path:
    """The executable ``name`` of the wheel, such as ``mooncake_master``. Raises MooncakeMissingError."""
    try:
        package = importlib.import_module("mooncake")
    except ImportError as error:
        raise MooncakeMissingError(explain(str(error))) from error
    for directory in package.__path__:
        path = Path(directory) / name
        if path.is_file():
            return path
    raise MooncakeMissingError(f"the installed Mooncake has no executable {name}")


def replicate_config(module: Any, *, replicas: int, soft_pin: bool, hard_pin: bool) -> Any:
    """A ReplicateConfig; what it can say differs between versions.

    ``with_soft_pin`` became ``soft_pin_action`` in 0.3.13; ``with_hard_pin`` is there since 0.3.10.post2.
    Raises SettingsError when the installed version cannot do what is asked.
    """
    config = module.ReplicateConfig()
    config.replica_num = replicas
    if soft_pin:
        if hasattr(config, "soft_pin_action"):
            config.soft_pin_action = module.SoftPinAction.ENABLE
        elif hasattr(config, "with_soft_pin"):
            config.with_soft_pin = True
        else:
            raise SettingsError("soft_pin: the installed Mooncake has no soft pins")
    if hard_pin:
        if not hasattr(config, "with_hard_pin"):
            raise SettingsError("hard_pin: the installed Mooncake has no hard pins")
        config.with_hard_pin = True
    return config
