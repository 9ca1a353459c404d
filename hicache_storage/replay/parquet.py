"""Keeps the rows of a replay as a Parquet file, for people who plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from hicache_storage.engine.report import Source
from hicache_storage.replay.replay import Row


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write one row for each request; the file appears complete or not at all. Raises OSError."""
    columns: dict[str, list[int] | list[float]] = {
        "request": [row.index for row in rows],
        "arrival_ms": [row.arrival_ms for row in rows],
        "tokens": [row.report.tokens for row in rows],
        "bound_tokens": [row.bound_tokens for row in rows],
        "wrong_bytes": [row.report.wrong_bytes for row in rows],
    }
    for source in Source:
        name = source.value.lower()
        columns[f"{name}_tokens"] = [row.report.tokens_from(source) for row in rows]
        columns[f"{name}_bytes"] = [row.report.nbytes(source) for row in rows]
        columns[f"{name}_seconds"] = [row.report.seconds[source] for row in rows]
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        pq.write_table(pa.table(columns), partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
