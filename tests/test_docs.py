"""What the documents show is what there is: code is quoted in full, commands run, tables are current."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hicache_storage.settings import SdkSettings

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/*/README.md"))]
SEEN_ELSEWHERE = ("make ", "pip ", "python -m sglang")
"""Set-up is what CI does first, and servers need a GPU."""


def commands(document):
    for block in re.findall(r"```console\n(.*?)```", document.read_text(), re.DOTALL):
        for line in re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.MULTILINE):
            if not line.startswith(SEEN_ELSEWHERE):
                yield line


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if list(commands(d))], ids=lambda d: d.name)
def test_the_commands_of_a_document_run_as_printed_one_after_the_other(document, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    shutil.copy(ROOT / "examples" / "dict_backend.py", tmp_path)
    for line in commands(document):
        done = subprocess.run(
            ["bash", "-c", line.replace("/nvme/kv", str(tmp_path / "kv"))],
            capture_output=True,
            text=True,
            check=False,
            cwd=tmp_path,
            env={**os.environ, "PATH": path, "TMPDIR": str(tmp_path)},
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_the_examples_of_the_engine_page_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "engine.md").read_text(), re.DOTALL)
    for number, block in enumerate(blocks):
        code = block.replace("/nvme/kv", str(tmp_path / str(number)))
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=tmp_path, timeout=120)


def test_the_readme_shows_the_example_backend_in_full():
    source = (ROOT / "examples" / "dict_backend.py").read_text()
    assert f"```python\n{source}```" in (ROOT / "README.md").read_text()
    assert len(source.splitlines()) <= 25


def settings_table():
    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in SdkSettings.model_fields.items():
        default = "none" if field.default is None else repr(field.default).lower().replace("'", '"')
        rows.append(f"| `{name}` | `{default}` | {field.description} |")
    return "\n".join(rows)


def test_the_operators_settings_table_is_the_settings():
    assert settings_table() in (ROOT / "docs" / "operate.md").read_text()


def test_links_between_documents_lead_somewhere():
    for document in DOCUMENTS:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
