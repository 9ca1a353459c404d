"""The command line application: our commands, and those of installed plugins."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hicache_storage import __version__
from hicache_storage.cli import COMMANDS
from hicache_storage.cli.bench import bench
from hicache_storage.cli.doctor import doctor
from hicache_storage.cli.new import new
from hicache_storage.cli.replay import replay
from hicache_storage.registry import BackendInfo, installed
from hicache_storage.settings import parse_assignments, read_table
from hicache_storage.sglang.launch_args import launch_args as flags_for
from hicache_storage.sglang.launch_args import pasted
from hicache_storage.storage import Capabilities

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Storage for SGLang HiCache.",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hicache-storage {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Storage for SGLang HiCache."""


@app.command()
def backends() -> None:
    """List the installed backends, their versions and what they can do."""
    table = Table("backend", "distribution", "version", "capabilities")
    for info in installed():
        table.add_row(info.name, info.distribution, info.version, _described(info))
    Console(soft_wrap=False).print(table)


def _described(info: BackendInfo) -> str:
    if info.capabilities is None:
        return f"[red]{info.problem}[/red]"
    return ", ".join(capability_words(info.capabilities)) or "the three methods"


def capability_words(capabilities: Capabilities) -> list[str]:
    """The capabilities that are there, in words: switches by name, numbers as name=value."""
    words = []
    default = Capabilities()
    for name in Capabilities.__dataclass_fields__:
        value = getattr(capabilities, name)
        if value is True:
            words.append(name)
        elif value != getattr(default, name):
            words.append(f"{name}={value}")
    return words


@app.command("launch-args")
def launch_args(
    backend: Annotated[str, typer.Argument(help="An installed backend, or module:Class.")],
    assignments: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="A setting; may be repeated.")
    ] = [],  # noqa: B006 (typer copies it)
    config: Annotated[str, typer.Option(help="Settings as JSON text or @file.json|toml|yaml.")] = "{}",
    sglang_version: Annotated[str | None, typer.Option(help="The SGLang version to launch.")] = None,
) -> None:
    """Print the flags that make SGLang load BACKEND, ready to paste."""
    settings = {**read_table(config), **parse_assignments(assignments)}
    typer.echo(pasted(flags_for(backend, settings, sglang_version)))


app.command()(doctor)
app.command()(new)
app.command()(replay)
app.add_typer(bench, name="bench")

for point in sorted(entry_points(group=COMMANDS), key=lambda point: point.name):
    try:
        app.add_typer(point.load())
    except Exception as error:
        typer.echo(f"hicache-storage: commands of plugin {point.name!r} do not load: {error}", err=True)
