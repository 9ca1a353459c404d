"""Settings of the NIXL backend, our own form and that of SGLang's NIXL configuration files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ByteSize, Field, model_validator

from hicache_storage.directory.settings import DirectIO, RoomSettings
from hicache_storage_nixl.plugins import ALIASES, PLUGINS

logger = logging.getLogger(__name__)

OBJECT_PLUGINS = {name for name, plugin in PLUGINS.items() if plugin.kind == "OBJ"}

STORAGE_DIR = "SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"


class NixlSettings(RoomSettings):
    """What an operator may set: ``root`` for plugins that move files, ``params`` for the others."""

    plugin: str = Field(
        "auto",
        description="auto, posix, gds, gds_mt, hf3fs, obj, azure_blob, another plugin of NIXL by its name, "
        "or SGLang's table of plugins",
    )
    params: dict[str, Any] = Field({}, description="What the plugin is told, in NIXL's own words")
    tables: dict[str, dict[str, Any]] = Field(
        {}, description="The same for each plugin that auto may choose; SGLang's form arrives here"
    )
    root: Path | None = Field(
        None,
        description=f"Directory of plugins that move files, created with mode 0700; default: {STORAGE_DIR}",
    )
    prefix: str = Field("", pattern=r"^[\w./-]*$", description="What object keys begin with in the bucket")
    direct_io: DirectIO = Field(
        "auto",
        description="auto: O_DIRECT for pages that are aligned, where the disk can; on: refused where it "
        "cannot; off: through the page cache",
    )
    threads: int = Field(
        default_factory=lambda: min(4, max(2, os.cpu_count() or 1)),
        ge=1,
        le=64,
        description="Streams that read pages, and as many that write",
    )
    in_flight: ByteSize = Field(
        ByteSize(256 << 20),
        ge=1 << 20,
        description="Bytes of one batch in flight at a time; as much memory is used for each direction",
    )
    use_direct_io: bool | None = Field(None, description="SGLang's word for direct_io")
    l3_cleaner_enabled: bool | None = Field(None, description="SGLang's; of no effect, see capacity")
    l3_cleaner_high_watermark: float | None = Field(None, description="SGLang's; of no effect")
    l3_cleaner_low_watermark: float | None = Field(None, description="SGLang's; of no effect")

    @model_validator(mode="before")
    @classmethod
    def _from_sglang(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        table = dict(given)
        if isinstance(table.get("plugin"), Mapping):
            table.update(_active(table["plugin"]))
        if table.get("use_direct_io") is not None:
            table.setdefault("direct_io", "auto" if table["use_direct_io"] else "off")
        if (
            "root" not in table
            and str(table.get("plugin")) not in OBJECT_PLUGINS
            and STORAGE_DIR in os.environ
        ):
            table["root"] = os.environ[STORAGE_DIR]
            if "," in table["root"]:
                raise ValueError(
                    f"root: {STORAGE_DIR} names several directories, which only SGLang's own can"
                )
        if any(key.startswith("l3_cleaner_") for key in table):
            logger.info("l3_cleaner_*: not used; capacity and min_free bound the directory at any time")
        return table

    @model_validator(mode="after")
    def _fitting(self) -> NixlSettings:
        if self.params and self.plugin == "auto":
            raise ValueError("params: say which plugin they are for, by plugin=")
        return self

    def told(self, name: str) -> dict[str, Any]:
        """What the plugin called ``name`` is to be told."""
        return self.params if self.plugin != "auto" else self.tables.get(name, {})


def _active(given: Mapping[str, Any]) -> dict[str, Any]:
    """The first active plugin of SGLang's table; ``auto`` over all of them when none is."""
    tables = {}
    chosen = "auto"
    for written, table in given.items():
        if not isinstance(table, Mapping):
            raise ValueError(f"plugin.{written}: a table of parameters is due")  # noqa: TRY004 (pydantic's)
        name = ALIASES.get(written.lower(), written.lower())
        # empty values stand for "not set" in SGLang's sample
        told = {key: value for key, value in table.items() if key != "active" and value != ""}
        tables[name] = {_SPELLING.get(key, key): value for key, value in told.items()}
        if str(table.get("active", "")).lower() == "true" and chosen == "auto":
            chosen = name
    if chosen == "auto":
        return {"plugin": "auto", "tables": {k: v for k, v in tables.items() if k in PLUGINS}}
    return {"plugin": chosen, "params": tables[chosen]}


_SPELLING = {"secrete_key": "secret_key"}
"""As SGLang's sample file spells it."""
