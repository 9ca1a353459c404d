"""Writes docs/sglang.md from what ran: one JUnit file a SGLang version.

    python tests_sglang/matrix.py results-0.5.23.xml ... > docs/sglang.md

`make sglang-matrix` runs the tests on all versions and this after them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

CASE = re.compile(r"test_every_pool_and_layout_comes_back_byte_for_byte\[(\w+?)-(\w+)-(\w+)-([01])\]")
COLUMNS = (
    ("layer_first", "kernel"),
    ("layer_first", "direct"),
    ("page_first", "kernel"),
    ("page_first_direct", "direct"),
    ("page_head", "kernel"),
)
KINDS = ("mha", "mla", "dsa", "swa", "mamba")

HEAD = """\
# SGLang versions

Written by `make sglang-matrix` from a run of [tests_sglang](../tests_sglang): SGLang's own cache controller, radix tree
and host pools on a CPU (only GPU imports and copy kernels are replaced), with `--hicache-storage-backend dynamic` and
our file backend. Each **yes** is a request that went insert, write-through, backup to L3, eviction from device and host,
prefetch, load back, and came back byte for byte; once through the v1 (zero copy) interface and once through the generic
one. A dash is a pool or layout that this version of SGLang does not have.
"""

NOTES = """
## What differs between versions

| | 0.5.10.post1 | 0.5.14 | 0.5.23 |
|---|---|---|---|
| registration | anchor pool; sidecars after the threads started | the same | anchor, every pool by v2, then `on_host_pools_registered` |
| lookup of a request | 128 pages a call | 128 pages a call; hybrid models all at once | all pages at once |
| `restorable_prefix_pages` | not there | not there | intersected across ranks |
| failure injector | not there | not there | wraps any backend, ours too |
| a backend that raises in backup | kills the backup thread | kills the backup thread | is logged |

DSA models are refused on 0.5.10.post1: its host pool leaves the index out of what it stores, so every prefix that came
back from L3 would be wrong, with any backend.

## Several ranks

Two real tensor-parallel ranks on gloo, with SGLang's own agreement between them ([test_ranks.py](../tests_sglang/test_ranks.py)):
MLA pages are stored once, by SGLang's writer, and restored by both; MHA shards and Mamba states stay per rank; a page
or state that one rank lost, or cannot read, shortens the prefix on both. Where a version falls short, with any backend:

* Up to 0.5.14, MLA hybrids with Mamba at TP > 1 never hit L3: SGLang backs up the state of one rank only. They lose nothing.
* On 0.5.10.post1, Mamba hybrids at TP > 1 get no L3 from us: the version does not make ranks agree on the states that
  they loaded, and one unreadable state would hang the server.
"""


def outcomes(path: Path) -> dict[tuple[str, str, str], list[str]]:
    """The outcomes of each pool, layout and io backend in one JUnit file."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for case in ET.parse(path).iter("testcase"):
        matched = CASE.match(case.get("name", ""))
        if matched:
            kind, layout, io_backend, _ = matched.groups()
            states = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            found.setdefault((kind, layout, io_backend), []).append(states[0] if states else "passed")
    return found


def cell(states: list[str] | None) -> str:
    if not states:
        return "-"
    if all(state == "passed" for state in states):
        return "**yes**"
    return "refused" if all(state == "skipped" for state in states) else "FAILS"


def main() -> None:
    print(HEAD)
    for path in map(Path, sys.argv[1:]):
        found = outcomes(path)
        if not found:
            sys.exit(f"{path} holds no run of the adapter's tests")
        print(f"## {path.stem.removeprefix('results-')}\n")
        print("| pool | " + " | ".join(f"{layout}, {io}" for layout, io in COLUMNS) + " |")
        print("|---|" + "---|" * len(COLUMNS))
        for kind in KINDS:
            print(f"| {kind} | " + " | ".join(cell(found.get((kind, *column))) for column in COLUMNS) + " |")
        print()
    print(NOTES.strip())


if __name__ == "__main__":
    main()
