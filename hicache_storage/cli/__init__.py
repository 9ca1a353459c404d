"""The ``hicache-storage`` command. Plugins add commands by the entry point group below."""

from __future__ import annotations

import sys

COMMANDS = "hicache_storage.commands"
"""Entry points that name a typer.Typer: its commands appear beside ours."""


def main() -> None:
    """Run the command; what a user can mend is one line on stderr and exit status 2."""
    from hicache_storage.cli.app import app
    from hicache_storage.errors import StorageError

    try:
        app()
    except StorageError as error:
        print(f"hicache-storage: {error}", file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:
        sys.exit(141)
