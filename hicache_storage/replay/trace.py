"""Reads request traces in the format published with the Mooncake paper (kvcache-ai/Mooncake).

One JSON object a line: ``timestamp`` (ms), ``input_length`` and ``output_length`` (tokens), and
``hash_ids``, one id for each 512-token block of the prompt; equal ids mean equal prefixes. The last
block of a prompt may be partly filled; it is taken as full, since its id says when it is the same.
"""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

from hicache_storage.errors import SettingsError
from hicache_storage.replay.request import Request

BLOCK_TOKENS = 512

_EXPECTED = (
    'expected one object a line, {"timestamp": MS, "input_length": TOKENS, "output_length": TOKENS, '
    f'"hash_ids": [ID, ...]}} with one id for each {BLOCK_TOKENS} input tokens'
)


def read_trace(path: Path, max_requests: int | None = None) -> list[Request]:
    """The first ``max_requests`` requests of a trace (None: all); blank lines are skipped.

    Raises SettingsError: ``file:line: what is wrong; what was expected``.
    """
    requests = []
    try:
        with path.open("rb") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for number, line in islice(numbered, max_requests):
                try:
                    requests.append(_parse(line))
                except ValueError as error:
                    raise SettingsError(f"{path}:{number}: {error}; {_EXPECTED}") from None
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from error
    if not requests:
        raise SettingsError(f"{path}: the trace is empty; {_EXPECTED}")
    return requests


def _parse(line: bytes) -> Request:
    try:
        record = json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"not an object but {type(record).__name__}")  # noqa: TRY004
    timestamp, length, _ = (_natural(record, key) for key in ("timestamp", "input_length", "output_length"))
    ids = record.get("hash_ids")
    if not isinstance(ids, list) or not all(type(block) is int and block >= 0 for block in ids):
        raise ValueError("hash_ids is missing or not a list of integers that are 0 or more")
    if not ids or len(ids) != -(-length // BLOCK_TOKENS):
        raise ValueError(f"{len(ids)} hash_ids do not fit an input_length of {length}")
    return Request(timestamp, tuple([(block, BLOCK_TOKENS) for block in ids]))


def _natural(record: dict[str, Any], key: str) -> int:
    value = record.get(key)
    if type(value) is not int or value < 0:
        raise ValueError(f"{key} is missing or not an integer that is 0 or more")
    return value
