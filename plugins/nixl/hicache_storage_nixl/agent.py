"""One NIXL agent with one storage plugin: created, and chosen by what really initialises."""

from __future__ import annotations

import logging
import os
import re
import uuid
from dataclasses import dataclass
from typing import Any

from hicache_storage import SettingsError
from hicache_storage_nixl import library
from hicache_storage_nixl.plugins import AUTO, PLUGINS, Kind, checked, find
from hicache_storage_nixl.settings import NixlSettings

logger = logging.getLogger(__name__)

POLITE_RETRIES = {"AWS_RETRY_MODE": "standard", "AWS_MAX_ATTEMPTS": "2"}
"""Set unless they are set already: with the AWS SDK's defaults a dead endpoint costs 25 s a call."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent and the plugin that it moves pages by."""

    api: Any
    """A ``nixl_agent``. Thread-safe as we create it (several threads on one without locks abort)."""
    nixl_name: str
    kind: Kind
    told: dict[str, str]
    why: str
    """Why this plugin, and why not those before it."""
    refusals: tuple[type[Exception], ...]
    """What its calls raise."""
    unregistered: type[Exception]
    """What they raise for memory that was not registered."""


def create(settings: NixlSettings) -> Agent:
    """The agent that these settings ask for.

    Raises SettingsError when the plugin does not initialise, with NIXL's reason or the missing library.
    """
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read once, when it is imported
    module = library.load()
    bindings = module.nixlBind
    api = module.nixl_agent(
        f"hicache-{uuid.uuid4().hex}",
        # backends: by default UCX, which listens on the network
        module.nixl_agent_config(backends=[], sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW),
    )
    wanted = AUTO if settings.plugin == "auto" else (settings.plugin,)
    refusals: tuple[type[Exception], ...] = tuple(
        getattr(bindings, name) for name in dir(bindings) if re.fullmatch(r"nixl\w+Error", name)
    )
    passed_over: list[str] = []
    for name in wanted:
        plugin = find(name)
        told = checked(name, settings.told(name))
        problem = library.problem_with(module, plugin.nixl_name) or _needs(name, told)
        if not problem:
            if plugin.kind == "OBJ":
                for key, value in POLITE_RETRIES.items():
                    os.environ.setdefault(key, value)
            try:
                api.create_backend(plugin.nixl_name, told)
            except refusals as error:
                problem = f"it does not initialise ({error}); NIXL says more on stderr"
        if not problem:
            why = "; ".join([f"{plugin.nixl_name} initialises", *passed_over])
            logger.info("NIXL plugin %s", why)
            return Agent(api, plugin.nixl_name, plugin.kind, told, why, refusals, bindings.nixlNotFoundError)
        passed_over.append(f"not {plugin.nixl_name}: {problem}")
    raise SettingsError(f"plugin {settings.plugin}: {'; '.join(passed_over)}")


def _needs(name: str, told: dict[str, str]) -> str:
    """What a plugin lacks that it cannot be created without."""
    if find(name) is PLUGINS["obj"] and not (told.get("bucket") or os.environ.get("AWS_DEFAULT_BUCKET")):
        return "params.bucket is not set, nor AWS_DEFAULT_BUCKET"
    if find(name) is PLUGINS["azure_blob"] and not (
        told.get("container_name") or os.environ.get("AZURE_STORAGE_CONTAINER_NAME")
    ):
        return "params.container_name is not set, nor AZURE_STORAGE_CONTAINER_NAME"
    return ""
