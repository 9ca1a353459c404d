"""Turns what obstore raises into the contract's errors, without the text that may hold secrets.

obstore tells the kinds of most failures only in its message, which repeats the service's answer:
key ids, signatures' strings to sign, presigned URLs. So the status and the service's error code
are taken out, and nothing else gets into ours.
"""

from __future__ import annotations

import re

from hicache_storage.errors import (
    AccessDeniedError,
    CapacityError,
    DeadlineError,
    StorageError,
    UnavailableError,
)

_STATUS = re.compile(r"status(?: code)?: (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w{1,60})\s*</Code>")

_SLOW = {"SlowDown", "SlowDownRead", "SlowDownWrite", "RequestLimitExceeded", "TooManyRequests"}
_REFUSED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_FULL = {"QuotaExceeded", "XMinioStorageFull", "EntityTooLarge"}

HINTS = {
    "RequestTimeTooSkewed": "the clock of this machine is wrong",
    "InvalidAccessKeyId": "the service does not know this access key",
    "SignatureDoesNotMatch": "the secret key does not belong to the access key, or the region is wrong",
    "ExpiredToken": "the session token has expired",
    "NoSuchBucket": "the bucket does not exist",
    "AccessDenied": "the credentials lack a permission",
}


class SlowDownError(UnavailableError):
    """The service asks for fewer requests."""


class NoSuchBucketError(StorageError):
    """The bucket does not exist."""


class AlreadyThereError(StorageError):
    """The object exists, so a conditional put did nothing."""


def answer(status: int, code: str, doing: str) -> StorageError:
    """What an HTTP status and an S3 error code mean; ``doing`` is shown, as in "reading a page"."""
    said = f"the store answered {status}{f' {code}' if code else ''} when {doing}"
    if hint := HINTS.get(code):
        said += f": {hint}"
    if code == "NoSuchBucket":
        return NoSuchBucketError(said)
    if status in (401, 403) or code in _REFUSED:
        return AccessDeniedError(said)
    if status == 507 or code in _FULL:
        return CapacityError(said)
    if status in (429, 503) or code in _SLOW:
        return SlowDownError(said)
    if status in (408, 409) or status >= 500:
        return UnavailableError(said)
    return StorageError(said)


def translate(error: BaseException, doing: str) -> StorageError:
    """The StorageError that ``error`` means.

    FileNotFoundError is for callers to catch first, except where it means that there is no bucket.
    """
    if isinstance(error, StorageError):
        return error
    text, kind = str(error), type(error).__name__  # by name: see runtime
    found = _CODE.search(text)
    code = found[1] if found else ""
    status = _STATUS.search(text)
    # a 409 says that another write is in progress, which may fail; obstore makes no difference
    if kind == "AlreadyExistsError" and not (status and status[1] == "409"):
        return AlreadyThereError(f"already there when {doing}")
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return answer(int(status[1]) if status else 403, code, doing)
    if isinstance(error, (KeyError, TypeError, ValueError, AttributeError)):
        return StorageError(f"{kind} when {doing}")
    if status:
        return answer(int(status[1]), code, doing)
    if "Timeout" in text or "timed out" in text:
        return DeadlineError(f"the store did not answer in time when {doing}")
    if "redential" in text or "InstanceMetadata" in text or "169.254.169.254" in text:
        return AccessDeniedError(f"no credentials were found when {doing}: set a profile, keys or AWS_*")
    return UnavailableError(f"the store could not be reached, or broke off, when {doing}")
