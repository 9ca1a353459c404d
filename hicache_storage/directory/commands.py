"""``hicache-storage verify|du|gc|clear DIR``: look after a directory of pages, in use or not.

All of it is safe while servers use the directory, and may be interrupted at any point: each page
is removed by one unlink and counted afterwards.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hicache_storage.directory.evict import Remover, free, sweep
from hicache_storage.directory.settings import room_nbytes
from hicache_storage.directory.tree import BOOKKEEPING, SHARDS, Entry, Tree
from hicache_storage.directory.usage import Usage
from hicache_storage.directory.verify import problem_with

app = typer.Typer(help="Look after a directory of pages.", no_args_is_help=True)

Root = Annotated[Path, typer.Argument(metavar="DIR", help="The root directory of the store")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed")]

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@app.command()
def verify(
    root: Root,
    delete: Annotated[bool, typer.Option("--delete", help="Remove objects that are corrupt")] = False,
) -> None:
    """Check the header and the checksum of every page; exit status 1 when corrupt ones are left.

    Pages that were stored with integrity off have no header and count as corrupt.
    """
    pages = nbytes = corrupt = 0
    with _opened(root) as (tree, usage), _progress("verifying", usage.totals().pages) as progress:
        remover = Remover(tree, usage)
        for entry in _entries(tree):
            try:
                problem = problem_with(tree, entry)
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                problem = f"cannot be read: {error.strerror}"
            pages += 1
            nbytes += entry.nbytes
            if problem:
                corrupt += 1
                progress.console.print(f"{entry.namespace}/{entry.name}: {problem}", soft_wrap=True)
                if delete:
                    remover.remove(entry)
            progress.advance(progress.task_ids[0])
    removed = f", {remover.pages} of them removed" if delete else ""
    print(f"{pages} pages, {_size(nbytes)}: {corrupt} corrupt{removed}")
    if corrupt > remover.pages:
        raise typer.Exit(1)


@app.command()
def du(root: Root) -> None:
    """Show what each namespace takes, and when it was last used."""
    with _opened(root) as (tree, usage):
        found: dict[str, _Share] = {name: _Share() for name in tree.namespaces()}
        with _progress("counting", usage.totals().pages) as progress:
            for entry in _entries(tree):
                found.setdefault(entry.namespace, _Share()).add(entry)
                progress.advance(progress.task_ids[0])
        table = Table("namespace", "identity", "pages", "size", "oldest use", "newest use")
        for name, share in found.items():
            table.add_row(
                name[:12],
                _identity(tree, name),
                str(share.pages),
                _size(share.nbytes),
                _when(share.oldest_ns),
                _when(share.newest_ns),
            )
        counted = usage.totals()
    Console().print(table)
    total = sum(share.nbytes for share in found.values())
    print(f"{sum(share.pages for share in found.values())} pages, {_size(total)} in {len(found)} namespaces")
    if counted.nbytes != total:
        print(f"the usage file says {_size(counted.nbytes)}: pages are being written, or a recount is due")


@app.command()
def gc(
    root: Root,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="Remove pages not used for 30m, 12h, 7d, 2w")
    ] = "",
    to: Annotated[
        str, typer.Option("--to", metavar="SIZE", help="Remove the least recently used until 100GB are left")
    ] = "",
    dry_run: DryRun = False,
) -> None:
    """Remove pages by age or down to a size, least recently used first."""
    if bool(older_than) == bool(to):
        raise typer.BadParameter("give one of --older-than AGE and --to SIZE")
    seconds = _age(older_than) if older_than else 0.0
    target = _target(to) if to else 0
    with _opened(root) as (tree, usage), _progress("removing", usage.totals().pages) as progress:
        remover = Remover(tree, usage, dry_run)

        def report() -> bool:
            progress.update(progress.task_ids[0], completed=remover.pages)
            return False

        if older_than:
            sweep(tree, time.time_ns() - int(seconds * 1e9), remover, report)
        else:
            left = sum(entry.nbytes for entry in _entries(tree))
            if left > target:
                free(tree, usage, left - target, remover, report)
    _report(remover, dry_run)


@app.command()
def clear(
    root: Root,
    namespace: Annotated[str, typer.Option("--namespace", help="Digest of the namespace, or its start")] = "",
    everything: Annotated[bool, typer.Option("--all", help="Clear every namespace")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")] = False,
    dry_run: DryRun = False,
) -> None:
    """Remove all pages of one namespace, or of all."""
    if bool(namespace) == everything:
        raise typer.BadParameter("give one of --namespace NAME and --all")
    with _opened(root) as (tree, usage):
        chosen = tree.namespaces() if everything else [_namespace(tree, namespace)]
        if not (yes or dry_run):
            which = "all namespaces" if everything else f"{chosen[0]} ({_identity(tree, chosen[0])})"
            typer.confirm(f"Remove all pages of {which} in {root}?", abort=True)
        remover = Remover(tree, usage, dry_run)
        with _progress("removing", usage.totals().pages) as progress:
            for entry in _entries(tree, chosen):
                remover.remove(entry)
                progress.update(progress.task_ids[0], completed=remover.pages)
    _report(remover, dry_run)


@dataclass
class _Share:
    pages: int = 0
    nbytes: int = 0
    oldest_ns: int = 0
    newest_ns: int = 0

    def add(self, entry: Entry) -> None:
        self.oldest_ns = min(self.oldest_ns or entry.used_ns, entry.used_ns)
        self.newest_ns = max(self.newest_ns, entry.used_ns)
        self.pages += 1
        self.nbytes += entry.nbytes


@contextmanager
def _opened(root: Path) -> Iterator[tuple[Tree, Usage]]:
    """The store in ``root``; ends the command with a reason when there is none.

    What was removed is counted at the end, also when the command is interrupted.
    """
    try:
        if not root.exists():
            near = get_close_matches(root.name, [path.name for path in root.parent.iterdir()], n=1)
            hint = f"; did you mean {root.parent / near[0]}?" if near else ""
            raise typer.BadParameter(f"{root} does not exist{hint}")
        if not root.is_dir():
            raise typer.BadParameter(f"{root} is not a directory")
        if not (root / BOOKKEEPING).is_dir() and any(root.iterdir()):
            raise typer.BadParameter(f"{root} holds no HiCache pages: there is no {BOOKKEEPING} in it")
        tree = Tree(root)
        usage = Usage(tree)
        if not usage.known():
            usage.recount()
    except OSError as error:
        raise typer.BadParameter(f"{root} cannot be opened: {error.strerror}") from error
    try:
        yield tree, usage
    finally:
        usage.totals()


def _entries(tree: Tree, namespaces: list[str] | None = None) -> Iterator[Entry]:
    for shard in range(SHARDS):
        yield from tree.entries(shard, namespaces)


@contextmanager
def _progress(title: str, total: int) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(), transient=True) as progress:
        progress.add_task(title, total=total or None)
        yield progress


def _report(remover: Remover, dry_run: bool) -> None:
    print(f"{'would remove' if dry_run else 'removed'} {remover.pages} pages, {_size(remover.nbytes)}")
    if remover.stuck:
        print(f"{remover.stuck} pages could not be removed")
        raise typer.Exit(1)


def _namespace(tree: Tree, name: str) -> str:
    known = tree.namespaces()
    starting = [digest for digest in known if digest.startswith(name)]
    if len(starting) == 1:
        return starting[0]
    if starting:
        raise typer.BadParameter(f"{name!r} may be any of {', '.join(starting)}")
    near = get_close_matches(name, known, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
    raise typer.BadParameter(f"no namespace is called {name!r}; {hint}")


def _identity(tree: Tree, namespace: str) -> str:
    try:
        stored: dict[str, Any] = json.loads(tree.identity(namespace))
    except ValueError:
        return "unknown"
    shown = {name: value for name, value in stored.items() if value not in ("", 0, [], [0, 0])}
    shown.pop("schema", None)
    return ", ".join(f"{name}={value}" for name, value in shown.items()) or "no identity given"


def _age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not an age such as 30m, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _target(text: str) -> int:
    if text.strip().endswith("%"):
        raise typer.BadParameter("--to takes a size such as 100GB")
    try:
        return room_nbytes(text, 0)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _size(nbytes: int) -> str:
    size, units = float(nbytes), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    for larger in units:
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if unit != "B" else f"{nbytes} B"


def _when(used_ns: int) -> str:
    return datetime.fromtimestamp(used_ns / 1e9).astimezone().strftime("%Y-%m-%d %H:%M") if used_ns else "-"
