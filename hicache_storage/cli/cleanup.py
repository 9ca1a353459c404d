"""Commands that were interrupted leave nothing behind."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer


@contextmanager
def temporary_directory(prefix: str) -> Iterator[Path]:
    """A directory for pages, removed at the end whatever happens."""
    root = Path(tempfile.mkdtemp(prefix=prefix))
    has_run = False
    try:
        yield root
        has_run = True
    finally:
        # a second Ctrl-C must not leave half of the pages behind
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
        if has_run:  # many small files take a while
            typer.echo(f"removing {root}", err=True)
        try:
            shutil.rmtree(root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM unwinds as Ctrl-C does."""

    def leave(_signal: int, _frame: object) -> None:
        sys.exit(143)

    handler = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)
