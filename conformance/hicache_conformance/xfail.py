"""The author's file of cases that are known to fail, each with its reason.

TOML or YAML, one table: ``"content.bit_flip" = "no checksum before version 2, see our issue 17"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hicache_conformance.case import SelectionError, select
from hicache_storage import SettingsError
from hicache_storage.settings import read_file


def read_xfail(path: Path) -> Mapping[str, str]:
    """Case name -> reason. Raises SettingsError naming the entry that is wrong."""
    table = read_file(path)
    for name, reason in table.items():
        if not isinstance(reason, str) or not reason.strip():
            raise SettingsError(f"{path}: {name}: a reason is due, as text")
        try:
            select([name])
        except SelectionError as error:
            raise SettingsError(f"{path}: {error}") from None
    return table
