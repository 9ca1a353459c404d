"""The flags that make SGLang load a backend of ours, ready to paste."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from hicache_storage.errors import SettingsError
from hicache_storage.open import check_settings
from hicache_storage.registry import find_backend
from hicache_storage.settings import NoSettings, environment_prefix, secret_settings

OLDEST = (0, 5, 10)
"""First SGLang version whose dynamic backends this adapter was run with."""

LAYOUT = "page_first_direct"
IO_BACKEND = "direct"
"""The one pair that no SGLang version rewrites, and that keeps a page in two buffers."""


def launch_args(backend: str, settings: Mapping[str, Any], sglang_version: str | None = None) -> list[str]:
    """The arguments for ``python -m sglang.launch_server`` that load ``backend`` with ``settings``.

    Raises SettingsError when a setting is wrong or a secret, or the SGLang version is older than 0.5.10.
    """
    check_settings(backend, settings)
    if secrets := secret_settings(settings, find_backend(backend).Settings or NoSettings):
        names = ", ".join(environment_prefix(backend) + key.upper() for key in secrets)
        raise SettingsError(
            f"{', '.join(secrets)}: every user of the machine can read arguments; set {names} in the "
            "environment of SGLang instead"
        )
    if sglang_version is not None and _release(sglang_version) < OLDEST:
        raise SettingsError(f"SGLang {sglang_version} is older than 0.5.10, the oldest that is supported")
    extra = {
        "backend_name": backend,
        "module_path": "hicache_storage.sglang",
        "class_name": "HiCacheBackend",
        "interface_v1": 1,
        **settings,
    }
    return [
        "--enable-hierarchical-cache",
        "--page-size=64",
        f"--hicache-mem-layout={LAYOUT}",
        f"--hicache-io-backend={IO_BACKEND}",
        "--hicache-write-policy=write_through",
        "--hicache-storage-prefetch-policy=timeout",
        "--hicache-storage-backend=dynamic",
        f"--hicache-storage-backend-extra-config={json.dumps(extra)}",
    ]


def pasted(arguments: list[str]) -> str:
    """The arguments quoted for a shell, one a line."""
    return " \\\n".join(shlex.quote(argument) for argument in arguments)


def _release(version: str) -> tuple[int, ...]:
    numbers = version.removeprefix("v").split(".")[:3]
    try:
        return tuple(int(number) for number in numbers)
    except ValueError:
        raise SettingsError(f"{version!r} is not a version of SGLang, such as 0.5.23") from None
