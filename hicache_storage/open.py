"""Opens a backend with its layers: the one way in for engines, adapters, tools and tests.

::

    NamingLayer      page names -> object keys of this namespace
    MetricsLayer     what the caller sees
    BreakerLayer     errors end here; a dead backend costs nothing
    DeadlineLayer    every call returns in time
    IntegrityLayer   every page is proved
    FaultsLayer      only in drills
    the backend
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hicache_storage.errors import SettingsError
from hicache_storage.layers.breaker import BreakerLayer, BreakerPolicy
from hicache_storage.layers.deadline import DeadlineLayer, Deadlines
from hicache_storage.layers.faults import FaultsLayer
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage.layers.metrics import MetricsLayer
from hicache_storage.layers.naming import NamingLayer
from hicache_storage.namespace import Namespace
from hicache_storage.registry import find_backend
from hicache_storage.settings import NoSettings, SdkSettings, read_table, split_settings
from hicache_storage.storage import HiCacheStorage


def open_storage(
    backend: str,
    settings: Mapping[str, Any] | str | None = None,
    namespace: Namespace | None = None,
) -> HiCacheStorage:
    """The backend called ``backend`` (an entry point, or ``module:Class``), with all its layers.

    ``settings`` is one flat table for the SDK and the backend: a mapping, JSON text or ``@file``.
    Keys of the result are page names; the namespace, completed by the settings ``revision``,
    ``epoch`` and ``tenant``, is put in front of them.

    Raises SettingsError when a setting or the backend's name is wrong, StorageError when the
    backend cannot start.
    """
    table = read_table(settings) if isinstance(settings, str) else dict(settings or {})
    cls = find_backend(backend)
    sdk, own = split_settings(table, backend, cls.Settings or NoSettings)
    return layered(cls(own, _identified(namespace or Namespace(), sdk)), sdk, backend)


def check_settings(backend: str, settings: Mapping[str, Any]) -> None:
    """Raise SettingsError when ``open_storage`` would, as far as that can be told without opening."""
    split_settings(settings, backend, find_backend(backend).Settings or NoSettings)


def layered(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """``storage`` under the layers that ``sdk`` switches on; ``name`` labels its metrics."""
    if sdk.faults is not None:
        storage = FaultsLayer(storage, sdk.faults)
    if sdk.integrity:
        storage = IntegrityLayer(storage)
    if sdk.deadline:
        storage = DeadlineLayer(storage, Deadlines(sdk.exists_seconds, sdk.get_seconds, sdk.set_seconds))
    if sdk.breaker:
        policy = BreakerPolicy(sdk.breaker_failures, sdk.breaker_cooldown, negative_ttl=sdk.negative_ttl)
        storage = BreakerLayer(storage, policy)
    if sdk.metrics:
        storage = MetricsLayer(storage, name)
    return NamingLayer(storage)


def _identified(namespace: Namespace, sdk: SdkSettings) -> Namespace:
    given = {key: getattr(sdk, key) for key in ("revision", "epoch", "tenant") if getattr(sdk, key)}
    clashes = [key for key in given if getattr(namespace, key) not in (given[key], "", 0)]
    if clashes:
        raise SettingsError(f"{clashes[0]} is given twice: in the namespace and in the settings")
    return replace(namespace, **given)
