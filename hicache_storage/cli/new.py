"""``hicache-storage new``: a plugin of one's own that works from the first minute.

What is written is a whole distribution: a backend with three methods and two more, its settings,
an entry point, a README and a CI workflow that runs the conformance suite over it.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from typing import Annotated

import typer

from hicache_storage.errors import SettingsError

_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")

PYPROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "0.1.0"
description = "SGLang HiCache pages in {title}"
readme = "README.md"
requires-python = ">=3.10"
dependencies = ["hicache-storage>=0.1,<0.2"]

[project.optional-dependencies]
test = ["hicache-conformance>=0.1,<0.2", "pytest>=8"]

# this line is what makes `--backend {name}` work
[project.entry-points."hicache_storage.backends"]
{name} = "{package}:{cls}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""

README = """\
# {name}

SGLang HiCache pages in {title}.

    pip install -e ".[test]"
    hicache-conformance --backend {name}          # is it right?
    hicache-storage replay --backend {name} --set root=/tmp/{name}

In SGLang, add what this prints to `python -m sglang.launch_server`:

    hicache-storage launch-args {name} --set root=/data/{name}

`{package}/storage.py` is the whole backend. It keeps a page a file; put your store in its place, and
declare in `capabilities` what that one can do. Cases that fail for a known reason go into a file,
`hicache-conformance --xfail xfail.toml`: `"group.case" = "the reason"`.
"""

INIT = '''\
"""SGLang HiCache pages in {title}."""

from {package}.storage import {cls}, {cls}Settings

__version__ = "0.1.0"

__all__ = ["{cls}", "{cls}Settings"]
'''

STORAGE = '''\
"""The backend. ``get``, ``exists`` and ``set`` are all that a backend has to have."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hicache_storage import Capabilities, HiCacheStorage, Namespace, UnavailableError


class {cls}Settings(BaseModel):
    """What an operator may set; an unknown key is an error that names the nearest one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    root: Path = Field(description="Directory that holds the pages")


class {cls}(HiCacheStorage):
    """A page a file. Calls come from several threads at once, and from several processes."""

    Settings = {cls}Settings
    capabilities = Capabilities(persistent=True, shared=True, delete=True, clear=True)

    def __init__(self, settings: {cls}Settings, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._root = settings.root

    def get(self, key: str) -> bytes | None:
        try:
            return (self._root / key).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UnavailableError(f"{{key}} cannot be read: {{error}}") from error

    def exists(self, key: str) -> bool:
        return (self._root / key).is_file()

    def set(self, key: str, value: memoryview) -> None:
        path = self._root / key
        beside = path.with_name(f".{{uuid.uuid4().hex}}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            beside.write_bytes(value)
            os.replace(beside, path)  # readers see all of the page or none of it
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise UnavailableError(f"{{key}} was not stored: {{error}}") from error

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            (self._root / key).unlink(missing_ok=True)

    def clear(self) -> None:
        shutil.rmtree(self._root / self.namespace.digest, ignore_errors=True)
'''

WORKFLOW = """\
name: conformance

on: [push, pull_request]

jobs:
  conformance:
    runs-on: ubuntu-latest
    strategy:
      fail-fast: false
      matrix:
        python: ["3.10", "3.12"]
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: ${{{{ matrix.python }}}}
      - run: pip install -e ".[test]"
      - run: >-
          hicache-conformance --backend {name}
          --json report.json --html report.html --junit report.xml
      - uses: actions/upload-artifact@v4
        if: always()
        with:
          name: conformance-${{{{ matrix.python }}}}
          path: report.*
"""

FILES = {
    "pyproject.toml": PYPROJECT,
    "README.md": README,
    ".github/workflows/conformance.yml": WORKFLOW,
    "{package}/__init__.py": INIT,
    "{package}/storage.py": STORAGE,
    "{package}/py.typed": "",
}


def new(
    name: Annotated[str, typer.Argument(help="Name of the plugin: my-backend.")],
    directory: Annotated[Path | None, typer.Argument(help="Where to put it; default: ./NAME.")] = None,
) -> None:
    """Write a plugin that works, to be filled with a store of one's own."""
    for path in write_skeleton(name, directory or Path(name)):
        typer.echo(path)
    typer.echo(f"next: pip install -e '{directory or name}[test]' && hicache-conformance --backend {name}")


def write_skeleton(name: str, directory: Path) -> list[Path]:
    """Write the plugin called ``name`` into ``directory``; the files, in order.

    Raises SettingsError for a bad name, and when the directory has anything in it.
    """
    package = name.replace("-", "_")
    if _NAME.fullmatch(name) is None or keyword.iskeyword(package):
        raise SettingsError(f"{name!r} is no name for a plugin: lower case letters, digits and single dashes")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise SettingsError(f"{directory} is there already and not empty; nothing was written")
    words = name.split("-")
    cls = "".join(word.capitalize() for word in words) + "Storage"
    written = []
    for path, text in FILES.items():
        target = directory / path.format(package=package)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.format(name=name, title=" ".join(words), package=package, cls=cls))
        written.append(target)
    return written
