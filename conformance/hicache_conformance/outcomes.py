"""The four outcomes of a case, and the words in which a case states what it expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TypeVar

from hicache_storage import Status

T = TypeVar("T")


class Outcome(str, Enum):
    """What a case came to. These never merge: unsupported is no pass, expected-fail no fail."""

    PASS = "pass"  # noqa: S105 - an outcome, no password
    FAIL = "fail"
    UNSUPPORTED = "unsupported"
    EXPECTED_FAIL = "expected-fail"


class BrokenPromiseError(AssertionError):
    """The backend did not do what the case says it must."""


class UnsupportedCaseError(Exception):
    """The backend declares that it cannot do what the case is about; the message says what."""


def require(condition: object, promise: str) -> None:
    """Raise BrokenPromiseError saying ``promise`` unless ``condition`` holds."""
    if not condition:
        raise BrokenPromiseError(promise)


def expect(found: object, wanted: object, what: str) -> None:
    """Raise BrokenPromiseError unless ``found`` equals ``wanted``."""
    if found != wanted:
        raise BrokenPromiseError(f"{what}: {_short(wanted)} is due, found {_short(found)}")


def expect_statuses(found: object, wanted: Sequence[Status | set[Status]], what: str) -> None:
    """Raise BrokenPromiseError unless ``found`` is a list of one right status a page, in order."""
    if not isinstance(found, list) or len(found) != len(wanted):
        raise BrokenPromiseError(f"{what}: a list of {len(wanted)} statuses is due, found {_short(found)}")
    for index, (status, right) in enumerate(zip(found, wanted, strict=True)):
        choices = right if isinstance(right, set) else {right}
        if not isinstance(status, Status) or status not in choices:
            names = " or ".join(sorted(choice.name for choice in choices))
            raise BrokenPromiseError(f"{what}: page {index} of {len(wanted)} is {status!r}, {names} is due")


def expect_presence(found: object, wanted: Sequence[bool], what: str) -> None:
    """Raise BrokenPromiseError unless ``found`` is a list of real booleans equal to ``wanted``."""
    if not isinstance(found, list) or len(found) != len(wanted):
        raise BrokenPromiseError(f"{what}: a list of {len(wanted)} booleans is due, found {_short(found)}")
    for index, (there, right) in enumerate(zip(found, wanted, strict=True)):
        if there is not right:
            raise BrokenPromiseError(f"{what}: key {index} of {len(wanted)} is {there!r}, {right} is due")


def expect_error(kinds: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object]) -> None:
    """Raise BrokenPromiseError unless ``call`` raises one of these kinds."""
    names = kinds.__name__ if isinstance(kinds, type) else " or ".join(kind.__name__ for kind in kinds)
    try:
        result = call()
    except kinds:
        return
    except Exception as error:
        raise BrokenPromiseError(f"{names} is due, {type(error).__name__} was raised: {error}") from error
    raise BrokenPromiseError(f"{names} is due, the call returned {_short(result)}")


def _short(value: object, limit: int = 160) -> str:
    if isinstance(value, (bytes, bytearray, memoryview)):
        head = bytes(value[:16]).hex()
        return f"{len(value)} bytes {head}{'...' if len(value) > 16 else ''}"
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}... ({len(text)} characters)"
