"""Settings of the file backend."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from hicache_storage.directory.settings import DirectIO, RoomSettings


class FileSettings(RoomSettings):
    """What an operator may set. Only ``root`` has no default."""

    root: Path = Field(description="Directory that holds the pages; it is created with mode 0700")
    threads: int = Field(
        default_factory=lambda: min(8, max(2, os.cpu_count() or 1)),
        ge=1,
        le=256,
        description="Threads that read pages, and as many that write; default the cores, 2 to 8",
    )
    direct_io: DirectIO = Field(
        "auto",
        description="auto: O_DIRECT for reads that the page cache cannot answer; on: O_DIRECT for all that "
        "is aligned, refused where the disk cannot; off: never",
    )
