"""``hicache-storage replay``: a request stream through the tier engine, every page of it proved."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hicache_storage.cli.cleanup import temporary_directory, terminable
from hicache_storage.cli.ranks import meet, own_rank
from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    from rich.progress import Progress

    from hicache_storage.engine import TierEngine
    from hicache_storage.namespace import Namespace
    from hicache_storage.replay.replay import Row, Summary
    from hicache_storage.replay.request import Request
    from hicache_storage.storage import HiCacheStorage

_PATIENT = {"exists_seconds": 60, "get_seconds": 60, "set_seconds": 60}
"""Deadlines unless set: a replay is about what is cached, on however busy a machine it runs."""

_BACKUP_WAIT = 120.0


def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(help="Mooncake-format trace (JSON lines). Default: a generated chat workload."),
    ] = None,
    backend: Annotated[str, typer.Option(help="L3: an installed backend, or module:Class.")] = "file",
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be repeated.")
    ] = None,
    config: Annotated[str | None, typer.Option(help="Settings: JSON, or @file.json|toml|yaml.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the generated workload.")] = 0,
    kv_shape: Annotated[
        str | None,
        typer.Option(
            help="mha:LAYERSxHEADSxHEAD_DIM:DTYPE or mla:LAYERSxLATENT_DIM:DTYPE. "
            "Default: mha:2x1x4:bf16 for a trace, mha:4x2x32:bf16 for the workload."
        ),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens a page. Default: 512 for a trace, else 64.")
    ] = None,
    max_requests: Annotated[int | None, typer.Option(min=1, help="Stop after so many requests.")] = None,
    mem_layout: Annotated[
        str, typer.Option(help="Layout of L2: layer_first, page_first, page_first_direct or page_head.")
    ] = "page_first_direct",
    io_backend: Annotated[
        str, typer.Option(help="How L1 and L2 exchange pages: direct or kernel.")
    ] = "direct",
    prefetch_policy: Annotated[
        str, typer.Option(help="How long a request waits for L3: best_effort, wait_complete or timeout.")
    ] = "wait_complete",
    prefetch_threshold: Annotated[
        int | None, typer.Option(min=0, help="Fewest tokens worth a prefetch. Default: one page.")
    ] = None,
    prefetch_timeout_base: Annotated[
        float, typer.Option(help="Policy timeout: seconds that any request waits.")
    ] = 1.0,
    prefetch_timeout_per_ki_token: Annotated[
        float, typer.Option(help="Policy timeout: seconds more for each 1024 tokens.")
    ] = 0.25,
    queue: Annotated[int, typer.Option(min=0, help="Requests that wait, prefetching, while others run.")] = 0,
    write_policy: Annotated[
        str,
        typer.Option(help="When pages go down to L2: write_through, write_through_selective or write_back."),
    ] = "write_through",
    l1_tokens: Annotated[
        int | None, typer.Option(min=1, help="Size of L1. Default: twice the longest request.")
    ] = None,
    hicache_ratio: Annotated[float, typer.Option(help="Pages of L2 for each page of L1.")] = 2.0,
    hicache_size: Annotated[float | None, typer.Option(help="Size of L2 in GB; overrides the ratio.")] = None,
    hugepages: Annotated[str | None, typer.Option(help="Make L2 of huge pages: 2MB or 1GB.")] = None,
    prefault: Annotated[bool, typer.Option("--prefault", help="Take L2's memory at the start.")] = False,
    device: Annotated[str, typer.Option(help="Where L1 is: cpu or cuda.")] = "cpu",
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel ranks, a process each.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages, processes too.")] = 1,
    tp_lcm_size: Annotated[
        int | None, typer.Option(min=1, help="Store pages by so many slices of heads (page_head).")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep one row a request in this Parquet file.")] = None,
) -> None:
    """Replay requests through L1, L2 and L3 and check every byte that comes back.

    With several ranks the report is rank 0's, and a wrong byte on any of them counts.

    Exit status: 0, 1 when bytes were wrong, 2 for wrong options, 130 when interrupted.
    """
    _check_out(out)
    with ExitStack() as stack:
        stack.enter_context(terminable())
        stack.enter_context(_memory_errors())
        # torch and numpy take seconds to import; --help and wrong options need not wait for them
        if find_spec("torch") is None:
            raise SettingsError("the engine needs torch: pip install 'hicache-storage[engine]'")
        import torch

        from hicache_storage.engine import EngineOptions, KVShape, Place, Shard, TierEngine, resolve

        torch.set_num_threads(1)  # copies are small, and the other cores are the storage's
        requests = _requests(trace, seed, max_requests, page_size)
        page_size = page_size or (512 if trace else 64)
        shape = KVShape.parse(kv_shape or ("mha:2x1x4:bf16" if trace else "mha:4x2x32:bf16"))
        longest = max(request.length for request in requests) // page_size * page_size
        if l1_tokens is not None and l1_tokens < longest:
            raise SettingsError(f"l1_tokens {l1_tokens} do not hold the longest request; it needs {longest}")
        given: dict[str, Any] = {
            "l1_tokens": l1_tokens or max(2 * longest, page_size),
            "device": device,
            "hicache_ratio": hicache_ratio,
            "hicache_size": hicache_size,
            "mem_layout": mem_layout,
            "io_backend": io_backend,
            "write_policy": write_policy,
            "prefetch_policy": prefetch_policy,
            "prefetch_threshold": page_size if prefetch_threshold is None else prefetch_threshold,
            "prefetch_timeout_base": prefetch_timeout_base,
            "prefetch_timeout_per_ki_token": prefetch_timeout_per_ki_token,
            "hugepages": hugepages,
            "prefault": prefault,
            "backup_wait": _BACKUP_WAIT,
        }
        options, _ = resolve(EngineOptions(page_size, **given))
        shard = Shard(shape, Place.of(own_rank(), tp, pp), tp_lcm_size)
        namespace = shard.namespace(page_size, options.mem_layout, model="replay")
        storage, root = stack.enter_context(_storage(backend, config, assignments or [], namespace))
        ranks = stack.enter_context(meet(shard.place, root))
        engine = stack.enter_context(
            TierEngine(shape, page_size, storage=storage, ranks=ranks, tp_lcm_size=tp_lcm_size, **given)
        )
        _announce(str(trace or f"generated workload, seed {seed}"), len(requests), engine, backend)
        rows, summary, finished = _run(engine, requests, queue)
        _conclude(rows, summary, engine, None if own_rank() else out)
        if not finished:
            typer.echo(f"interrupted after {summary.requests} of {len(requests)} requests", err=True)
            raise typer.Exit(130)
        if summary.wrong_bytes:
            raise typer.Exit(1)


def _requests(
    trace: Path | None, seed: int, max_requests: int | None, page_size: int | None
) -> Sequence[Request]:
    from hicache_storage.replay.trace import BLOCK_TOKENS, read_trace
    from hicache_storage.replay.workload import Workload

    if trace is None:
        workload = Workload(seed=seed)
        return list(workload)[:max_requests]
    if page_size is not None and BLOCK_TOKENS % page_size:
        raise SettingsError(
            f"page_size {page_size} does not divide the trace's blocks of {BLOCK_TOKENS} tokens"
        )
    return read_trace(trace, max_requests)


@contextmanager
def _storage(
    backend: str, config: str | None, assignments: Sequence[str], namespace: Namespace
) -> Iterator[tuple[HiCacheStorage, dict[str, str]]]:
    """The backend with its layers; one that needs a ``root`` and has none gets a temporary directory.

    That is told to other ranks by an environment.
    """
    from hicache_storage import find_backend, open_storage
    from hicache_storage.settings import environment_prefix, parse_assignments, read_table

    table: dict[str, Any] = {
        **_PATIENT,
        **(read_table(config) if config else {}),
        **parse_assignments(assignments),
    }
    fields = getattr(find_backend(backend).Settings, "model_fields", {})
    variable = f"{environment_prefix(backend)}ROOT"
    is_given = "root" in table or variable in os.environ
    rootless = "root" in fields and fields["root"].is_required() and not is_given
    with temporary_directory("hicache-replay-") if rootless else nullcontext() as root:
        if root is not None:
            table["root"] = str(root)
        with open_storage(backend, table, namespace) as storage:
            yield storage, {} if root is None else {variable: str(root)}


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Pools that do not fit are wrong options."""
    try:
        yield
    except MemoryError as error:
        raise SettingsError(str(error) or "out of memory") from error


def _run(engine: TierEngine, requests: Sequence[Request], queue: int) -> tuple[list[Row], Summary, bool]:
    """The rows, their sums, and whether all requests were done before Ctrl-C."""
    from hicache_storage.replay.replay import Summary
    from hicache_storage.replay.replay import replay as drive

    rows: list[Row] = []
    summary = Summary()
    with _progress() as progress:
        task = progress.add_task("replay", total=len(requests), hits="", wrong="")
        try:
            for row in drive(engine, requests, queue):
                rows.append(row)
                summary.add(row)
                progress.update(
                    task,
                    completed=len(rows),
                    hits=f"hit rate {summary.hit_rate:.1%}",
                    wrong=f"wrong bytes {summary.wrong_bytes}",
                )
            engine.wait_for_backup(_BACKUP_WAIT)
        except KeyboardInterrupt:
            return rows, summary, False
    return rows, summary, True


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[hits]}"),
        TextColumn("{task.fields[wrong]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=Console(stderr=True),
    )


def _announce(source: str, count: int, engine: TierEngine, backend: str) -> None:
    place = engine.shard.place
    rank = f", rank {place.rank} of {place.count}" if place.count > 1 else ""
    typer.echo(f"{source}: {count} requests; {engine.shape}, {engine.page_size} tokens a page{rank}")
    l1, l2, options = engine.l1_nbytes / 1e6, engine.l2_nbytes / 1e6, engine.options
    typer.echo(f"L1 {l1:.1f} MB on {options.device}; L2 {l2:.1f} MB, {engine.memory_kind}; L3 {backend}")
    typer.echo(
        f"mem_layout {options.mem_layout}, io_backend {options.io_backend}, {options.write_policy}, "
        f"prefetch {options.prefetch_policy}"
    )


def _conclude(rows: list[Row], summary: Summary, engine: TierEngine, out: Path | None) -> None:
    from rich.console import Console

    from hicache_storage.replay.table import summary_table

    stats = engine.stats
    Console().print(summary_table(summary))
    typer.echo(
        f"{engine.options.write_policy}: {stats.copied_to_l2} pages copied to L2, {stats.forgotten} left L1 "
        f"and were gone, {stats.backed_up} stored in L3"
    )
    if stats.prefetch_limited:
        typer.echo(f"{stats.prefetch_limited} pages were not asked of L3 at once: prefetches held L2")
    if lost := stats.backup_failed + stats.dropped:
        typer.echo(f"{lost} pages were not stored ({stats.storage_errors} calls of the storage failed)")
    typer.echo(f"hit rate: {summary.hit_rate:.1%} (bound {summary.bound:.1%})")
    typer.echo(f"wrong bytes: {summary.wrong_bytes}")
    if out is not None:
        from hicache_storage.replay.parquet import write_rows

        try:
            write_rows(rows, out)
        except OSError as error:
            raise SettingsError(f"--out {out}: cannot be written: {error.strerror}") from error


def _check_out(out: Path | None) -> None:
    """A long run must not fail at its end for what can be known at its start."""
    if out is None:
        return
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        raise SettingsError(f"--out {out}: no file can be written there")
    if find_spec("pyarrow") is None:
        raise SettingsError("--out needs pyarrow: pip install 'hicache-storage[engine]'")
