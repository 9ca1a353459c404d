"""``hicache-storage bench``: what the tiers of this machine can do."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hicache_storage.cli.cleanup import temporary_directory, terminable
from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    from hicache_storage.bench.copies import CopyRate
    from hicache_storage.bench.ttft import FirstToken
    from hicache_storage.engine import KVShape

bench = typer.Typer(no_args_is_help=True, help="Measure what the tiers of this machine can do.")

_LLAMA_8B = "mha:32x8x128:bf16"
_SMALL = "mha:4x2x32:bf16"
_LENGTHS = {"cuda": "2048,4096,8192,16384,32768,65536", "cpu": "256,1024"}


@bench.callback()
def options() -> None:
    """Measure what the tiers of this machine can do."""


@bench.command()
def tiers(
    device: Annotated[str, typer.Option(help="Where L1 is: cpu or cuda.")] = "cpu",
    shape: Annotated[
        str | None,
        typer.Option(help=f"KV of the model. Default: {_LLAMA_8B} (Llama-3.1-8B) on cuda, {_SMALL} on cpu."),
    ] = None,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens a page.")] = 64,
    pages: Annotated[int, typer.Option(min=1, help="Pages that one copy moves.")] = 128,
    tokens: Annotated[
        str | None,
        typer.Option(help=f"Prompt lengths, by commas. Default: {_LENGTHS['cuda']} on cuda."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; figures are medians over them.")] = 5,
    root: Annotated[
        Path | None, typer.Option(help="Directory of L3, on the disk to measure. Default: a temporary one.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write figures, hardware and versions.")] = None,
) -> None:
    """Copies between L1 and L2 by layout and I/O backend, and time to first token by tier."""
    try:
        from hicache_storage.engine import KVShape
        from hicache_storage.engine.pools import find_device
    except ImportError as error:
        raise SettingsError("bench needs torch: pip install 'hicache-storage[model]'") from error
    found = find_device(device)
    kv_shape = KVShape.parse(shape or (_LLAMA_8B if device == "cuda" else _SMALL))
    lengths = _lengths(tokens or _LENGTHS[device], page_size)
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise SettingsError(f"--json {out}: no file can be written there")
    if device == "cpu":
        import torch

        torch.set_num_threads(1)  # a team of spinning threads would measure itself
        typer.echo("on a cpu L1 is host memory too: these figures only show that the command works")
    from hicache_storage.bench.machine import command, hardware, versions

    figures: dict[str, Any] = {
        "command": command(),
        "hardware": hardware(found),
        "versions": versions(),
        "shape": str(kv_shape),
        "page_size": page_size,
        "pages": pages,
        "rounds": rounds,
        "copies": [],
        "overlap": [],
        "first_token": [],
    }
    typer.echo(f"{kv_shape}, {page_size} tokens a page, on {figures['hardware'].get('gpu', 'cpu')}")
    try:
        with terminable():
            _copies(figures, kv_shape, page_size, pages, found, rounds)
            if device == "cuda":
                figures["bars"] = _bars(figures["copies"])
            _first_tokens(figures, kv_shape, page_size, lengths, device, root, rounds)
    except MemoryError as error:
        raise SettingsError(f"{error}; lower --pages or --tokens, or take a smaller --shape") from error
    finally:
        if out is not None:  # what was measured before something failed is kept
            text = json.dumps(figures, indent=1, default=asdict)
            out.write_text(text + "\n")


def _lengths(text: str, page_size: int) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) >= page_size for part in parts):
        raise SettingsError(
            f"--tokens {text!r}: whole numbers by commas, each at least a page of {page_size}"
        )
    return sorted({int(part) for part in parts})


def _copies(
    figures: dict[str, Any], shape: KVShape, page_size: int, pages: int, device: Any, rounds: int
) -> None:
    """Measure and show every combination, and add what was measured to ``figures``."""
    from rich.console import Console
    from rich.table import Table

    from hicache_storage.bench.copies import copy_rates, opened, overlap
    from hicache_storage.engine import COPIED_BY, LAYOUTS

    table = Table("layout", "io", "H2D", "of peak", "D2H", "of peak", "overlap", title="copies, GB/s")
    for layout, io_backends in COPIED_BY.items():
        for io_backend in io_backends if shape.attention in LAYOUTS[layout].attentions else ():
            with opened(shape, page_size, pages, layout, io_backend, device) as pools:
                rates = copy_rates(pools, layout, io_backend, rounds)
                hidden = overlap(pools, layout, io_backend, rounds)
            figures["copies"] += rates
            figures["overlap"].append(hidden)
            cells = [cell for rate in rates for cell in (f"{rate.gb_s:.1f}", f"{rate.of_peak:.2f}")]
            table.add_row(layout, io_backend, *cells, f"{hidden.efficiency:.2f}")
    Console().print(table)


def _bars(rates: list[CopyRate]) -> list[dict[str, Any]]:
    from hicache_storage.bench.copies import BARS

    bars = []
    for rate in rates:
        bar = BARS.get((rate.mem_layout, rate.io_backend))
        if bar is not None:
            what = f"{rate.io_backend} {rate.mem_layout} {rate.direction} of peak"
            met = rate.of_peak >= bar
            typer.echo(f"{what}: {rate.of_peak:.2f}, bar {bar}: {'met' if met else 'missed'}")
            bars.append({"name": what, "value": rate.of_peak, "bar": bar, "met": met})
    return bars


def _first_tokens(
    figures: dict[str, Any],
    shape: KVShape,
    page_size: int,
    lengths: list[int],
    device: str,
    root: Path | None,
    rounds: int,
) -> None:
    """Measure and show every length, and add what was measured to ``figures``."""
    from rich.console import Console
    from rich.table import Table

    try:
        from hicache_storage.bench.ttft import SOURCES, break_even, first_tokens
    except ImportError as error:
        raise SettingsError("TTFT needs transformers: pip install 'hicache-storage[model]'") from error
    rows: list[FirstToken] = figures["first_token"]
    table = Table("tokens", *SOURCES, title="time to first token, ms")
    with nullcontext(root) if root else temporary_directory("hicache-bench-") as directory:
        for row in first_tokens(shape, page_size, lengths, device, directory, rounds):
            rows.append(row)
            table.add_row(str(row.tokens), *(f"{row.seconds[source] * 1e3:.1f}" for source in SOURCES))
    Console().print(table)
    for source in SOURCES[:-1]:
        fewest = break_even(rows, source)
        found = "never here" if fewest is None else f"from {fewest} tokens on"
        typer.echo(f"{source} beats computing: {found}")
