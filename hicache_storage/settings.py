"""Typed settings, from a dict, a file (``@file.json|toml|yaml``) and the environment.

One flat table carries the settings of the SDK and of the backend, since SGLang hands over one
``extra_config``. An unknown key is an error that names the nearest valid ones: a typo that is
silently ignored is a cache without a limit, or without a tenant.

The environment fills in what the table leaves out: ``HICACHE_STORAGE_<KEY>`` for the SDK,
``HICACHE_<BACKEND>_<KEY>`` for a backend.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from hicache_storage.errors import SettingsError
from hicache_storage.layers.faults import FaultPlan

M = TypeVar("M", bound=BaseModel)

SDK_ENVIRONMENT = "HICACHE_STORAGE_"


class SdkSettings(BaseModel):
    """Settings that every backend has: identity, integrity, deadlines, breaker, metrics."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    revision: str = Field(default="", description="Weights revision, part of the identity of every page")
    epoch: int = Field(default=0, ge=0, description="Bump it to forget all pages stored so far")
    tenant: str = Field(default="", description="Salt that keeps this tenant's pages apart")
    integrity: bool = Field(
        default=True, description="Header and checksum on every object, checked on every read"
    )
    deadline: bool = Field(
        default=True, description="Bound every call; without it a hung store hangs the caller"
    )
    exists_seconds: float = Field(default=1.0, gt=0, description="Deadline of a lookup")
    get_seconds: float = Field(default=5.0, gt=0, description="Deadline of a batch read")
    set_seconds: float = Field(default=10.0, gt=0, description="Deadline of a batch write")
    breaker: bool = Field(
        default=True, description="Stop asking a backend that fails; probe until it answers"
    )
    breaker_failures: int = Field(default=3, ge=1, description="Failing calls in a row that open the breaker")
    breaker_cooldown: float = Field(default=0.5, gt=0, description="Seconds before the first probe")
    negative_ttl: float = Field(default=10.0, ge=0, description="Seconds an unreadable key counts as absent")
    metrics: bool = Field(default=True, description="Count pages, bytes and seconds for Prometheus")
    faults: FaultPlan | None = Field(default=None, description="Faults to inject, for drills")


class NoSettings(BaseModel):
    """For a backend that declares no settings: every key is unknown to it."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def read_table(source: str) -> dict[str, Any]:
    """The table in ``source``: JSON text, or ``@path`` of a .json, .toml or .yaml file.

    Raises SettingsError that says where the text is wrong.
    """
    if source.startswith("@"):
        return read_file(Path(source[1:]).expanduser())
    return _table(source, "settings", json.loads)


def read_file(path: Path) -> dict[str, Any]:
    """The table in a settings file; its format follows its suffix."""
    readers = {".json": json.loads, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    reader = readers.get(path.suffix)
    if reader is None:
        raise SettingsError(f"{path}: settings files end in {', '.join(readers)}")
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read: {error}") from error
    return _table(text, str(path), reader)


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Settings from ``key=value`` words; values that are JSON are taken as such, others as text."""
    table: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise SettingsError(f"{assignment!r} is not of the form key=value")
        try:
            table[key] = json.loads(value)
        except ValueError:
            table[key] = value
    return table


def split_settings(
    table: Mapping[str, Any],
    backend: str,
    model: type[M],
    environment: Mapping[str, str] | None = None,
) -> tuple[SdkSettings, M]:
    """The SDK's and the backend's settings out of one flat table.

    Raises SettingsError naming the key: unknown (with the nearest valid ones), missing or wrong.
    """
    environment = os.environ if environment is None else environment
    sdk_keys, own_keys = set(SdkSettings.model_fields), set(model.model_fields)
    if model.model_config.get("extra") == "allow":
        own_keys |= set(table) - sdk_keys
    for key in table:
        if key not in sdk_keys | own_keys:
            near = _nearest(key, sdk_keys | own_keys)
            raise SettingsError(f"unknown setting {key!r} for backend {backend!r}{near}")
    sdk = _from_environment(SDK_ENVIRONMENT, sdk_keys, environment)
    own = _from_environment(environment_prefix(backend), own_keys, environment)
    sdk.update({key: value for key, value in table.items() if key in sdk_keys})
    own.update({key: value for key, value in table.items() if key in own_keys})
    return _validate(SdkSettings, sdk, backend), _validate(model, own, backend)


def secret_settings(table: Mapping[str, Any], model: type[BaseModel]) -> list[str]:
    """The keys of ``table`` that the backend declares as secrets (pydantic's SecretStr, or None)."""
    fields = model.model_fields.items()
    secret = {name for name, field in fields if SecretStr in (field.annotation, *get_args(field.annotation))}
    return [key for key in table if key in secret]


def environment_prefix(backend: str) -> str:
    """What the names of a backend's environment variables begin with."""
    return f"HICACHE_{re.sub(r'[^A-Z0-9]', '_', backend.upper())}_"


def _validate(model: type[M], values: dict[str, Any], backend: str) -> M:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # input values are left out on purpose: they may be secrets
        lines = [f"  {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_input=False)]
        raise SettingsError("\n".join([f"bad settings for backend {backend!r}:", *lines])) from None


def _from_environment(prefix: str, keys: set[str], environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in environment.items():
        if not name.startswith(prefix):
            continue
        key = name.removeprefix(prefix).lower()
        if key not in keys:
            raise SettingsError(f"unknown setting in the environment: {name}{_nearest(key, keys)}")
        values[key] = json.loads(value) if value[:1] in ("{", "[") else value
    return values


def _nearest(key: str, valid: set[str]) -> str:
    near = get_close_matches(key, sorted(valid), n=3, cutoff=0.5)
    return (
        f"; did you mean {' or '.join(map(repr, near))}?"
        if near
        else f"; valid are {', '.join(sorted(valid))}"
    )


def _table(text: str, where: str, read: Any) -> dict[str, Any]:
    try:
        table = read(text)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from error
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: a table of settings is due, not {type(table).__name__}")
    return table


def _toml(text: str) -> Any:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib

    return tomllib.loads(text)


def _yaml(text: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1} column {mark.column + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem}") from error
