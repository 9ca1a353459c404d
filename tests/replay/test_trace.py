"""The trace reader: what it takes, and what it says about lines that are wrong."""

import json

import pytest

from hicache_storage import SettingsError
from hicache_storage.replay.trace import BLOCK_TOKENS, read_trace

GOOD = {"timestamp": 27, "input_length": 1000, "output_length": 5, "hash_ids": [46, 0]}


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "trace.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts), encoding="utf-8", errors="surrogateescape")
        return path

    return write


def test_a_line_is_a_request_of_full_blocks(write):
    (request,) = read_trace(write(GOOD))
    assert request.arrival_ms == 27
    assert request.segments == ((46, BLOCK_TOKENS), (0, BLOCK_TOKENS))
    assert request.length == len(request.tokens()) == 1024


def test_equal_ids_are_equal_tokens_and_others_are_not(write):
    one, two = read_trace(write(GOOD, {**GOOD, "hash_ids": [46, 1]}))
    assert one.tokens() == one.tokens()
    assert one.tokens()[:512] == two.tokens()[:512]
    assert one.tokens()[512:] != two.tokens()[512:]


def test_further_fields_and_blank_lines_are_fine(write):
    assert len(read_trace(write("", {**GOOD, "type": "chat"}, "  ", GOOD))) == 2


def test_only_as_many_lines_are_read_as_are_wanted(write):
    assert len(read_trace(write(GOOD, GOOD, "rubbish"), max_requests=2)) == 2


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("rubbish", "not JSON: Expecting value"),
        ('{"timestamp": 1,', "not JSON"),
        ("\udcff\udcfe", "not JSON"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ("[1, 2]", "not an object but list"),
        ({**GOOD, "timestamp": -1}, "timestamp is missing or not an integer"),
        ({**GOOD, "input_length": "1000"}, "input_length is missing or not an integer"),
        ({**GOOD, "output_length": True}, "output_length is missing or not an integer"),
        ({**GOOD, "hash_ids": None}, "hash_ids is missing or not a list"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids is missing or not a list"),
        ({**GOOD, "hash_ids": [1, 2.0]}, "hash_ids is missing or not a list"),
        ({**GOOD, "hash_ids": [1]}, "1 hash_ids do not fit an input_length of 1000"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "3 hash_ids do not fit"),
        ({**GOOD, "input_length": 0, "hash_ids": []}, "0 hash_ids do not fit"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_what_was_expected(write, line, complaint):
    path = write(GOOD, GOOD, line, GOOD)
    with pytest.raises(SettingsError, match=f"trace.jsonl:3: ({complaint}).*; expected one object a line"):
        read_trace(path)


def test_an_empty_trace_is_an_error(write):
    with pytest.raises(SettingsError, match=r"trace.jsonl: the trace is empty; expected"):
        read_trace(write("", "\n"))


def test_a_trace_that_cannot_be_read_is_an_error(tmp_path):
    with pytest.raises(SettingsError, match=r"none.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(SettingsError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
