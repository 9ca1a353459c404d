"""``hicache-storage s3 lifecycle|gc|clear``: look after the pages in a bucket, in use or not.

Settings come from ``--config``, ``--set`` and ``HICACHE_S3_*``; keys are best left to the
credential chain, since arguments can be read by other users of the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Annotated

import typer
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from hicache_storage.settings import parse_assignments, read_table, split_settings
from hicache_storage_s3.bucket import (
    Removed,
    Stored,
    clear_namespace,
    older_than,
    oldest_over,
    remove,
    stored,
)
from hicache_storage_s3.client import Client
from hicache_storage_s3.lifecycle import apply_rules, rules
from hicache_storage_s3.removals import Removals
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.settings import S3Settings

app = typer.Typer(name="s3", help="Look after the pages in a bucket.", no_args_is_help=True)

Assignments = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be repeated.")
]
Config = Annotated[str, typer.Option(help="Settings as JSON text or @file.json|toml|yaml.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")]

_SECONDS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command()
def lifecycle(
    days: Annotated[int, typer.Option(min=1, help="Days that a page is kept.")],
    assignments: Assignments = None,
    config: Config = "{}",
    apply: Annotated[
        bool, typer.Option("--apply", help="Put the rules into force; other rules stay.")
    ] = False,
) -> None:
    """Print the lifecycle rules that let the service remove old pages, or apply them.

    Set retention_days to the same number of days where servers use the bucket.
    """
    settings = _settings(assignments, config)
    wanted = rules(settings, days)
    if apply:
        kept = apply_rules(settings, wanted)
        typer.echo(f"bucket {settings.bucket}: pages go after {days} days; {kept} other rules stay", err=True)
    print(json.dumps({"Rules": wanted}, indent=2))


@app.command()
def gc(
    assignments: Assignments = None,
    config: Config = "{}",
    older: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Remove what was stored before 30m, 12h, 7d, 2w."),
    ] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="SIZE", help="Remove the oldest until 100GB are left.")
    ] = "",
    dry_run: DryRun = False,
) -> None:
    """Remove pages by age or down to a size, for stores without lifecycle rules.

    Pages are counted as old from when they were stored: S3 does not tell when they were read.
    """
    if bool(older) == bool(to):
        raise typer.BadParameter("give one of --older-than AGE and --to SIZE")
    work = _Bucket(_settings(assignments, config))
    if older:
        cutoff = datetime.now(timezone.utc) - timedelta(seconds=_age(older))
        work.remove(older_than(work.client, cutoff), dry_run)
    else:
        going = oldest_over(work.client, _nbytes(to))
        work.remove(iter(going), dry_run, len(going))


@app.command()
def clear(
    assignments: Assignments = None,
    config: Config = "{}",
    namespace: Annotated[str, typer.Option(help="Digest of the namespace, or its start.")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Clear every namespace.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove all pages of one namespace, or of all."""
    if bool(namespace) == everything:
        raise typer.BadParameter("give one of --namespace DIGEST and --all")
    settings = _settings(assignments, config)
    work = _Bucket(settings)
    known = sorted({one.digest for one in stored(work.client)})
    chosen = known if everything else [digest for digest in known if digest.startswith(namespace)]
    if not everything and len(chosen) != 1:
        raise typer.BadParameter(
            f"{namespace!r} is none of, or more than one of: {', '.join(known) or 'none'}"
        )
    if chosen and not (yes or dry_run):
        typer.confirm(f"Remove all pages of {', '.join(chosen)} in bucket {settings.bucket}?", abort=True)
    work.remove((one for digest in chosen for one in clear_namespace(work.client, digest)), dry_run)


@dataclass
class _Bucket:
    """A bucket to remove from."""

    settings: S3Settings

    def __post_init__(self) -> None:
        self.client = Client(self.settings)
        self._removals = Removals(self.client, Persistence(self.settings.retries))

    def remove(self, objects: Iterator[Stored], dry_run: bool, total: int | None = None) -> None:
        """Remove them with a progress bar, and say what was removed also when that breaks off."""
        removed = Removed()
        try:
            with _progress(total) as progress:

                def tell(so_far: Removed) -> None:
                    removed.objects, removed.nbytes = so_far.objects, so_far.nbytes
                    progress.update(progress.task_ids[0], completed=so_far.objects)

                if dry_run:
                    for one in objects:
                        tell(Removed(removed.objects + 1, removed.nbytes + one.nbytes))
                else:
                    remove(self.client, self._removals, objects, tell)
        finally:
            word = "would remove" if dry_run else "removed"
            print(f"{word} {removed.objects} objects, {ByteSize(removed.nbytes).human_readable()}")


@contextmanager
def _progress(total: int | None) -> Iterator[Progress]:
    columns = TextColumn("removing"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("", total=total)
        yield progress


def _settings(assignments: list[str] | None, config: str) -> S3Settings:
    table = {**read_table(config), **parse_assignments(assignments or [])}
    return split_settings(table, "s3", S3Settings)[1]


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([mhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _nbytes(text: str) -> int:
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise typer.BadParameter(f"{text!r} is not a size such as 100GB") from None
