"""The table that a replay ends with."""

from __future__ import annotations

from rich.table import Table

from hicache_storage.engine.report import Source
from hicache_storage.replay.replay import Summary


def summary_table(summary: Summary) -> Table:
    """One line for each tier: what came from there, how fast, and its share of all tokens."""
    table = Table("tier", title="where the tokens came from", title_justify="left")
    for heading in ("pages", "tokens", "bytes", "GB/s", "hit rate", "bound"):
        table.add_column(heading, justify="right")
    for source in Source:
        nbytes, seconds = summary.nbytes[source], summary.seconds[source]
        is_hit = source is not Source.RECOMPUTED
        table.add_row(
            source.value,
            f"{summary.pages[source]:,}",
            f"{summary.tokens_from[source]:,}",
            f"{nbytes:,}",
            f"{nbytes / seconds / 1e9:.2f}" if nbytes and seconds else "-",
            f"{summary.tokens_from[source] / summary.tokens:.1%}" if is_hit and summary.tokens else "-",
            end_section=not is_hit,
        )
    table.add_row(
        "total",
        f"{sum(summary.pages.values()):,}",
        f"{summary.tokens:,}",
        f"{sum(summary.nbytes.values()):,}",
        "",
        f"{summary.hit_rate:.1%}",
        f"{summary.bound:.1%}",
    )
    return table
