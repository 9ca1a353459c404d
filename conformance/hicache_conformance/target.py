"""The backend under test: its class, the settings it is opened with, and what it says it can do."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points, packages_distributions, version
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import BaseModel

from hicache_storage import Capabilities, HiCacheStorage, Namespace
from hicache_storage.open import layered
from hicache_storage.registry import GROUP, find_backend
from hicache_storage.settings import NoSettings, SdkSettings, split_settings

Layered: TypeAlias = Callable[[HiCacheStorage, SdkSettings, str], HiCacheStorage]

TMP = "{tmp}"
PLACE = "root"
ROOM = "capacity"

_find = cache(find_backend)
_SECRET = re.compile(r"secret|passw|token|credential|api_?key|access_?key|private", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Target:
    """A backend by name, and its settings as the user gave them.

    ``{tmp}`` in a value stands for a fresh directory of each case. A required setting called
    ``root`` that was not given is such a directory.
    """

    backend: str
    table: Mapping[str, Any] = field(default_factory=dict)
    stack: Layered = layered
    """What puts the layers on; only a mutant has another one."""

    @property
    def cls(self) -> type[HiCacheStorage]:
        """The backend's class. Raises SettingsError."""
        return _find(self.backend)

    @property
    def model(self) -> type[BaseModel]:
        """The type of the backend's settings."""
        model: type[BaseModel] = self.cls.Settings or NoSettings
        return model

    @property
    def needs_place(self) -> bool:
        """Whether each case gets a directory of its own."""
        return TMP in repr(dict(self.table)) or self._lacks_place()

    @property
    def can_be_small(self) -> bool:
        """Whether the suite can give the store little room: a setting ``capacity``, in bytes."""
        return ROOM in self.model.model_fields

    def settings(self, tmp: Path, **own: Any) -> tuple[SdkSettings, Any]:
        """The SDK's and the backend's settings with ``tmp`` filled in and ``own`` on top.

        Raises SettingsError.
        """
        table = dict(self.table)
        if self._lacks_place():
            table[PLACE] = f"{TMP}/store"
        filled = {key: _fill(value, str(tmp)) for key, value in table.items()}
        return split_settings({**filled, **own}, self.backend, self.model)

    def open(self, tmp: Path, namespace: Namespace, **own: Any) -> HiCacheStorage:
        """The bare backend. Raises StorageError, or whatever the author lets out."""
        return self.cls(self.settings(tmp, **own)[1], namespace)

    def probe(self, tmp: Path) -> Capabilities:
        """What an opened instance says it can do."""
        with self.open(tmp, Namespace(model="hicache-conformance")) as storage:
            return storage.capabilities

    def shown(self) -> dict[str, Any]:
        """The given settings with secrets masked."""
        fields = self.model.model_fields
        return {
            key: "***" if _SECRET.search(key) or (key in fields and "Secret" in repr(fields[key])) else value
            for key, value in self.table.items()
        }

    def version(self) -> str:
        """``distribution version`` that the backend came with, or what is known of it."""
        for point in entry_points(group=GROUP):
            if point.name == self.backend and point.dist is not None:
                return f"{point.dist.name} {point.dist.version}"
        top = self.cls.__module__.partition(".")[0]
        found = packages_distributions().get(top)
        if found:
            return f"{found[0]} {version(found[0])}"
        return str(getattr(sys.modules.get(top), "__version__", "unknown"))

    def _lacks_place(self) -> bool:
        place = self.model.model_fields.get(PLACE)
        return place is not None and place.is_required() and PLACE not in self.table


def _fill(value: Any, tmp: str) -> Any:
    if isinstance(value, str):
        return value.replace(TMP, tmp)
    if isinstance(value, dict):
        return {key: _fill(inner, tmp) for key, inner in value.items()}
    return [_fill(inner, tmp) for inner in value] if isinstance(value, list) else value
