"""Errors a backend or a layer may raise, each kind saying what the caller may do.

::

    StorageError
    ├── RequestError             the call is wrong: mend the call
    │   ├── InvalidKeyError      a key that no backend can hold
    │   ├── BufferMismatchError  pages and keys, or pages and memory, do not fit
    │   └── UnsupportedError     the backend does not have this capability
    ├── SettingsError            the configuration is wrong: mend it, then open again
    ├── ClosedError              the storage was closed: open a new one
    ├── BusyError                in use: let that end, then try again
    ├── UnavailableError         the store cannot be reached now: a miss, try later
    ├── DeadlineError            no answer in time: a miss, try later
    ├── CapacityError            no room: the page is not stored, try later
    ├── AccessDeniedError        the store refuses us: an operator must act
    └── CorruptError             the object is not the page: a miss, the next set heals it

``retryable`` says whether the same call may succeed later without anybody changing anything.
A missing key is no error: ``get`` returns None, ``batch_get_into`` says ``Status.MISSING``.
"""


class StorageError(Exception):
    """Anything the storage has to say; catch this and treat the page as a miss."""

    retryable: bool = False


class RequestError(StorageError):
    """The caller's own mistake. Layers let it through: it must be seen, not counted as a miss."""


class InvalidKeyError(RequestError):
    """The key is empty, too long, or has characters that no backend can be asked to hold."""


class BufferMismatchError(RequestError):
    """Keys and pages differ in number, or a buffer lies outside the registered memory."""


class UnsupportedError(RequestError):
    """The backend lacks this capability; ask ``capabilities`` before the call."""


class SettingsError(StorageError):
    """A setting is unknown, malformed or contradicts another; the message names it."""


class ClosedError(StorageError):
    """The storage was closed, or is being closed by another thread."""


class BusyError(StorageError):
    """Something that goes on must end first; the message says what."""

    retryable = True


class UnavailableError(StorageError):
    """The store does not answer, or answers with a failure that may pass."""

    retryable = True


class DeadlineError(StorageError):
    """The call's deadline passed. Nothing touches the caller's memory any more."""

    retryable = True


class CapacityError(StorageError):
    """Quota or disk is full. Reads go on; eviction may make room."""

    retryable = True


class AccessDeniedError(StorageError):
    """Permissions, credentials or a read-only store; retrying does not help."""


class CorruptError(StorageError):
    """The stored object is not what was written. Delete or overwrite it."""
