"""Mooncake's return codes, and what they mean to a caller.

Most calls of ``mooncake.store`` answer with a number a key: 0 or a size is good, negative is one of
these (seen with 0.3.13.post1).
"""

from __future__ import annotations

from collections.abc import Sequence

from hicache_storage import (
    AccessDeniedError,
    CapacityError,
    DeadlineError,
    StorageError,
    UnavailableError,
)

OK = 0
EXISTS = 1
NO_ROOM = -200
INVALID = -600
NOT_READY = -703
NOT_FOUND = -704
LEASE_EXPIRED = -707
NO_REPLICA = -710
REPLICA_GONE = -712
TRANSFER_FAILED = -800
CHECKSUM = -801
RPC_FAILED = -900
RPC_TIMEOUT = -901
OVER_QUOTA = -1700
UNKNOWN_TENANT = -1701

ABSENT = frozenset({NOT_READY, NOT_FOUND, LEASE_EXPIRED, NO_REPLICA, REPLICA_GONE})
"""There is nothing to read, or nothing any more: LEASE_EXPIRED means that memory may be recycled."""

WORTH_RETRYING = frozenset({NO_ROOM, TRANSFER_FAILED})
"""A put may succeed soon: eviction makes room, or the next segment has an owner that lives."""

MASTER_SILENT = frozenset({RPC_FAILED, RPC_TIMEOUT})
"""The master could not be asked."""

_MEANINGS: dict[int, tuple[type[StorageError], str]] = {
    NO_ROOM: (CapacityError, "no segment has room"),
    OVER_QUOTA: (CapacityError, "the tenant's quota is used up"),
    INVALID: (StorageError, "the arguments are refused"),
    TRANSFER_FAILED: (UnavailableError, "the transfer failed; the segment's owner may be gone"),
    RPC_FAILED: (UnavailableError, "the master cannot be reached"),
    RPC_TIMEOUT: (DeadlineError, "the master does not answer"),
    UNKNOWN_TENANT: (AccessDeniedError, "the master knows no such tenant"),
}


def error_of(code: int, what: str) -> StorageError:
    """The StorageError that stands for a negative code."""
    kind, meaning = _MEANINGS.get(code, (UnavailableError, "the call failed"))
    return kind(f"{what}: {meaning} (Mooncake's code {code})")


def complete(codes: Sequence[int], count: int) -> list[int]:
    """``codes``, or INVALID for each of ``count`` keys when Mooncake answered for another number."""
    return list(codes) if len(codes) == count else [INVALID] * count
