"""``hicache-storage bench tiers``: the command as it is run where there is a GPU, at a small size."""

import json

import pytest
from typer.testing import CliRunner

from hicache_storage import SettingsError, StorageError
from hicache_storage.bench import copies, ttft
from hicache_storage.bench.ttft import SOURCES, FirstToken, break_even
from hicache_storage.cli.app import app
from hicache_storage.engine import COPIED_BY

COMBINATIONS = {(layout, io_backend) for layout, backends in COPIED_BY.items() for io_backend in backends}


def run(*arguments):
    return CliRunner().invoke(app, ["bench", "tiers", *arguments], catch_exceptions=False)


def small(root, *arguments):
    sizes = ["--shape", "mha:2x1x8:fp32", "--page-size", "8", "--pages", "4", "--tokens", "40,16,40"]
    return run(*sizes, "--rounds", "1", "--root", str(root), *arguments)


def test_the_bench_prints_every_combination_and_writes_what_it_printed(tmp_path):
    out = tmp_path / "bench.json"
    done = small(tmp_path / "kv", "--json", str(out))
    assert done.exit_code == 0, done.output
    assert "only show that the command works" in done.output
    figures = json.loads(out.read_text())
    assert {(rate["mem_layout"], rate["io_backend"]) for rate in figures["copies"]} == COMBINATIONS
    assert {rate["direction"] for rate in figures["copies"]} == {"H2D", "D2H"}
    assert all(rate["gb_s"] > 0 and rate["of_peak"] > 0 for rate in figures["copies"])
    assert len(figures["overlap"]) == len(COMBINATIONS)
    assert [row["tokens"] for row in figures["first_token"]] == [16, 40]
    assert all(set(row["seconds"]) == set(SOURCES) for row in figures["first_token"])
    assert {"hardware", "versions", "command", "shape", "rounds"} < set(figures)
    assert figures["hardware"]["cpu"]
    assert figures["versions"]["torch"]
    assert "bars" not in figures  # there are none for a cpu


def test_the_bench_leaves_no_pages_behind(tmp_path):
    assert small(tmp_path).exit_code == 0
    assert [path for path in tmp_path.glob("*/??/*") if path.is_file()] == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--device", "tpu"], "device 'tpu' is none of: cpu, cuda"),
        (["--shape", "mha:2x2"], "KV shape 'mha:2x2' is not of the form"),
        (["--tokens", "1k"], "--tokens '1k': whole numbers by commas"),
        (["--tokens", "63"], "each at least a page of 64"),
        (["--json", "/nowhere/x.json"], "no file can be written there"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_measured(arguments, complaint):
    with pytest.raises(SettingsError, match=complaint):
        run(*arguments)


def test_a_model_that_llama_cannot_be_is_refused_after_its_copies_were_measured(tmp_path):
    out = tmp_path / "bench.json"
    with pytest.raises(SettingsError, match="a Llama has mha KV"):
        run("--shape", "mla:2x64:bf16", "--pages", "2", "--rounds", "1", "--json", str(out))
    layouts = {rate["mem_layout"] for rate in json.loads(out.read_text())["copies"]}
    assert layouts == {"layer_first", "page_first", "page_first_direct"}


def test_pools_that_do_not_fit_say_which_option_to_lower():
    with pytest.raises(SettingsError, match=r"does not fit.*lower --pages or --tokens"):
        run("--shape", "mha:32x8x128:bf16", "--pages", "100000000")


def rows(**speed_ups):
    return [
        FirstToken(int(tokens[1:]), {"L3": 1.0, "recomputed": speed_up})
        for tokens, speed_up in speed_ups.items()
    ]


def test_break_even_is_where_a_source_begins_to_win_for_good():
    assert break_even(rows(t1=0.5, t2=0.9, t4=1.1, t8=3.0), "L3") == 4
    assert break_even(rows(t1=2.0, t2=0.9, t4=1.1), "L3") == 4
    assert break_even(rows(t1=2.0, t2=2.0), "L3") == 1
    assert break_even(rows(t1=2.0, t2=0.5), "L3") is None


def test_a_figure_is_never_taken_from_another_tier_than_it_says(tmp_path, monkeypatch):
    monkeypatch.setattr(ttft.Bench, "_flush", lambda _bench: None)
    with pytest.raises(
        StorageError, match=r"came from L1, recomputed instead of L3|came from L1 instead of L3"
    ):
        small(tmp_path)


@pytest.mark.parametrize(("of_peak", "word"), [(0.95, "met"), (0.7, "missed")])
def test_bars_are_said_to_be_met_or_missed(capsys, of_peak, word):
    from hicache_storage.cli.bench import _bars

    rates = [copies.CopyRate(*key, "H2D", 50.0, 55.0, of_peak) for key in COMBINATIONS]
    bars = _bars(rates)
    assert {bar["name"] for bar in bars} == {
        "direct page_first_direct H2D of peak",
        "kernel page_first H2D of peak",
    }
    assert capsys.readouterr().out.count(word) == 2
