"""``hicache-storage replay`` from the outside."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pyarrow.parquet as pq
import pytest

from hicache_storage.cli import main

BACKENDS = """
import time
from pathlib import Path
from pydantic import BaseModel
from hicache_storage import Capabilities, HiCacheStorage

class Dict(HiCacheStorage):
    capabilities = Capabilities(delete=True)
    def __init__(self, settings, namespace):
        super().__init__(settings, namespace)
        self.pages = {}
    def get(self, key): return self.pages.get(key)
    def exists(self, key): return key in self.pages
    def set(self, key, value): self.pages[key] = bytes(value)
    def delete(self, keys): pass

class Rooted(BaseModel):
    root: Path

class Slow(Dict):
    Settings = Rooted
    def set(self, key, value):
        (self.settings.root / "begun").touch()
        time.sleep(0.0005)
        super().set(key, value)

class Lying(Dict):
    def get(self, key): return bytes(len(self.pages[key]))

class LyingOnAnotherRank(Dict):
    def get(self, key): return bytes(len(self.pages[key])) if self.namespace.ranks[0][1] else self.pages[key]

class MissingOnAnotherRank(Dict):
    def __init__(self, settings, namespace):
        super().__init__(settings, namespace)
        if namespace.ranks[0][1]: raise OSError("no such luck")

class Dead(Dict):
    def get(self, key): raise OSError("no such luck")
    exists = get
    def set(self, key, value): raise OSError("no such luck")
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with backends, and a directory for temporary files of its own."""
    (tmp_path / "backends.py").write_text(BACKENDS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "backends", raising=False)
    return tmp_path


@pytest.fixture
def run(place, monkeypatch, capfd):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hicache-storage", "replay", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert list((place / "tmp").iterdir()) == []
        return ended.value.code, *capfd.readouterr()

    return run


def write_trace(tmp_path, count=60):
    lines = [
        {
            "timestamp": i,
            "input_length": 2048,
            "output_length": 1,
            "hash_ids": [0, 1 + i % 3, 10 + i % 30, 50 + i],
        }
        for i in range(count)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_trace_ends_with_its_hit_rate_and_the_wrong_bytes(run, tmp_path):
    out_file = tmp_path / "rows.parquet"
    status, out, errors = run(
        write_trace(tmp_path), "--backend", "hicache_storage_file:FileStorage", "--out", out_file
    )
    assert status == 0, errors
    # hits: block 0 but once, the second blocks but three times, the third blocks but 30 times
    rate = f"{(59 + 57 + 30) / 240:.1%}"
    assert out.splitlines()[-2:] == [f"hit rate: {rate} (bound {rate})", "wrong bytes: 0"]
    for word in ("L1", "L2", "L3", "recomputed", "total", "GB/s", "hit rate", "bound"):
        assert word in out
    assert pq.read_table(out_file).num_rows == 60


def test_the_generated_workload_is_the_default(run):
    status, out, errors = run("--backend", "backends:Dict", "--max-requests", 40, "--seed", 7)
    assert status == 0, errors
    assert "generated workload, seed 7: 40 requests" in out
    assert out.splitlines()[-1] == "wrong bytes: 0"


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_the_end_tells_what_the_write_policy_did(run, tmp_path, policy):
    status, out, errors = run(
        write_trace(tmp_path), "--backend", "backends:Dict", "--write-policy", policy, "--l1-tokens", 8192
    )
    assert status == 0, errors
    told = re.search(
        rf"^{policy}: (\d+) pages copied to L2, (\d+) left L1 and were gone, (\d+) stored in L3$",
        out,
        re.MULTILINE,
    )
    copied, gone, stored = map(int, told.groups())
    if policy == "write_through":
        assert (copied, gone, stored) == (94, 0, 94)  # every page there is
    elif policy == "write_through_selective":
        assert 0 < copied == stored < 94
        assert gone >= 50  # the last page of each request is used once, and 16 pages are left in L1
    else:
        assert gone == 0
        assert 94 - 16 <= stored < 94  # the last ones never left L1
    assert out.splitlines()[-1] == "wrong bytes: 0"


@pytest.mark.parametrize(
    ("io_backend", "in_force"), [("direct", "page_first_direct"), ("kernel", "page_first")]
)
def test_the_start_tells_what_is_in_force(run, tmp_path, caplog, io_backend, in_force):
    arguments = ["--backend", "backends:Dict", "--mem-layout", "page_first", "--io-backend", io_backend]
    status, out, errors = run(write_trace(tmp_path), *arguments)
    assert status == 0, errors
    assert f"mem_layout {in_force}, io_backend {io_backend}, write_through" in out
    assert ("SGLang 0.5.23 switches it" in caplog.text) == (in_force != "page_first")


def test_wrong_bytes_fail_the_command(run, tmp_path):
    status, out, _ = run(
        write_trace(tmp_path), "--backend", "backends:Lying", "--set", "integrity=false", "--l1-tokens", 2048
    )
    assert status == 1
    assert int(out.splitlines()[-1].removeprefix("wrong bytes: ")) > 0


def test_integrity_turns_a_lie_into_a_miss(run, tmp_path):
    status, out, errors = run(write_trace(tmp_path), "--backend", "backends:Lying", "--l1-tokens", 2048)
    assert status == 0, errors
    assert out.splitlines()[-1] == "wrong bytes: 0"


def test_a_dead_backend_costs_hits_only_and_is_told(run, tmp_path):
    status, out, errors = run(write_trace(tmp_path), "--backend", "backends:Dead")
    assert status == 0, errors
    assert "pages were not stored" in out
    assert out.splitlines()[-1] == "wrong bytes: 0"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.jsonl"], "missing.jsonl: cannot be read: No such file"),
        (["empty.jsonl"], "empty.jsonl: the trace is empty"),
        (["bad.jsonl"], "bad.jsonl:1: not JSON"),
        (["trace.jsonl", "--page-size", "100"], "page_size 100 does not divide"),
        (["--kv-shape", "mha:2"], "KV shape 'mha:2' is not of the form"),
        (["--mem-layout", "page_last"], "mem_layout 'page_last' is none of"),
        (["--io-backend", "rdma"], "io_backend 'rdma' is none of: direct, kernel"),
        (["--write-policy", "write_around"], "write_policy 'write_around' is none of"),
        (["--prefetch-policy", "never"], "prefetch_policy 'never' is none of"),
        (["--device", "tpu"], "device 'tpu' is none of"),
        (["--l1-tokens", "64"], "l1_tokens 64 do not hold the longest request"),
        (["--hicache-ratio", "0.5"], "L2 must be larger than L1"),
        (["--hicache-size", "1000000"], "does not fit"),
        (["--set", "nonsense"], "'nonsense' is not of the form key=value"),
        (["--set", "nonsense=1"], "unknown setting 'nonsense'"),
        (["--config", "@none.json"], "none.json: cannot be read"),
        (["--backend", "no_such_backend"], "no backend is called 'no_such_backend'"),
        (["--out", "missing/rows.parquet"], "no file can be written there"),
    ],
)
def test_a_mistake_is_one_clear_line(run, tmp_path, arguments, complaint):
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text("{\n")
    write_trace(tmp_path)
    if "--backend" not in arguments:
        arguments = [*arguments, "--backend", "hicache_storage_file:FileStorage"]
    status, out, errors = run(*arguments)
    assert status == 2
    assert complaint in errors
    assert len(errors.splitlines()) == 1
    assert out == ""


FEW = ("--max-requests", 12)


def test_a_replay_on_several_ranks_hits_as_one_on_a_single_rank(run):
    _, alone, _ = run(*FEW, "--kv-shape", "mha:4x4x8:bf16")
    status, out, errors = run(*FEW, "--kv-shape", "mha:4x4x8:bf16", "--tp", 2, "--pp", 2)
    assert status == 0, errors
    assert "mha:2x2x8:bf16, 64 tokens a page, rank 0 of 4" in out
    assert out.splitlines()[-2:] == alone.splitlines()[-2:]


def test_a_replay_finds_the_pages_of_one_with_another_tp_size_when_heads_are_split(run, tmp_path):
    split = ("--tp-lcm-size", 2, "--mem-layout", "page_head", "--io-backend", "kernel", "--set")
    root = f"root={tmp_path / 'pages'}"
    _, _, _ = run(*FEW, *split, root)
    status, out, errors = run(*FEW, *split, root, "--tp", 2)
    assert status == 0, errors
    assert "wrong bytes: 0" in out
    (recomputed,) = [line for line in out.splitlines() if "recomputed" in line]
    assert re.search(r"recomputed │\s+0 │", recomputed)  # not one page, the requests' rests aside


def test_a_wrong_byte_on_another_rank_fails_the_replay(run, tmp_path):
    backend = ("--backend", "backends:LyingOnAnotherRank", "--set", "integrity=false")
    ranks = ("--l1-tokens", 2048, "--tp", 2, "--kv-shape", "mha:2x2x4:bf16")
    status, out, errors = run(write_trace(tmp_path), *backend, *ranks)
    assert status == 1
    assert out.splitlines()[-1] == "wrong bytes: 0"
    assert "rank 1 failed" in errors
    assert re.search(r"wrong bytes: [1-9]", errors)


def test_a_rank_that_does_not_start_fails_the_replay_and_says_why(run):
    status, _, errors = run(*FEW, "--backend", "backends:MissingOnAnotherRank", "--tp", 2)
    assert status == 1
    assert "rank 1 failed" in errors
    assert "no such luck" in errors


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_replay_leaves_nothing_behind(place, number, status, ranks):
    out_file = place / "rows.parquet"
    script = "from hicache_storage.cli import main; main()"
    options = ["--backend", "backends:Slow", "--out", str(out_file), "--tp", str(ranks)]
    process = subprocess.Popen(
        [sys.executable, "-c", script, "replay", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    ends_at = time.monotonic() + 60
    while not list((place / "tmp").glob("*/begun")):
        assert time.monotonic() < ends_at
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(number)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    assert list((place / "tmp").iterdir()) == []
    if number == signal.SIGINT:
        assert out.splitlines()[-1] == "wrong bytes: 0"
        assert "interrupted after" in errors
        assert 0 < pq.read_table(out_file).num_rows < 2000


def test_help_loads_neither_torch_nor_pyarrow():
    script = (
        "import sys\n"
        "from hicache_storage.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in ('torch', 'numpy', 'pyarrow', 'sglang') if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "replay", "--help"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        capture_output=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == ""
    assert "--prefetch-policy" in done.stdout
