"""The few verbs of S3 that the backend needs, over obstore: bounded, counted, with our errors.

One request each, without secrets in any message; retries are ``retry``'s, but for listing and
removing. Objects are named by key; the settings' prefix is put in front here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from hicache_storage.errors import SettingsError
from hicache_storage_s3.credentials import Profile
from hicache_storage_s3.runtime import obstore_here
from hicache_storage_s3.s3errors import AlreadyThereError, translate
from hicache_storage_s3.settings import S3Settings

if TYPE_CHECKING:
    from obstore import GetResult, ObjectMeta
    from obstore.store import S3Store

T = TypeVar("T")

LOOKUP_SECONDS = 2.0
"""Longest time for a request without a page in it."""

LIST_PAGE = 1000
"""Most objects in one answer, and most keys in one multi-delete, that S3 allows."""

SIGNED_SECONDS = 300
"""How long a presigned URL is good; it is used at once, but clocks differ."""


class Client:
    """Thread-safe; costs three connection pools."""

    def __init__(self, settings: S3Settings) -> None:
        """Raises SettingsError for what obstore does not take, or a profile that is not there."""
        self._settings = settings
        self._obstore: Any = obstore_here()
        self._prefix = f"{settings.prefix}/" if settings.prefix else ""
        self._pages = make_store(settings, settings.request_seconds, "")
        self._uploads = self._pages
        self._bulk = make_store(settings, settings.request_seconds, "", settings.retries)
        self._quick = make_store(settings, min(settings.request_seconds, LOOKUP_SECONDS), "")
        self._lock = threading.Lock()
        self._requests: Counter[str] = Counter()

    def send_checksum(self, algorithm: str) -> None:
        """Have objects that are stored from now on carry this checksum; empty: none."""
        self._uploads = make_store(self._settings, self._settings.request_seconds, algorithm)

    @property
    def requests(self) -> dict[str, int]:
        """Requests sent so far, by S3 operation."""
        with self._lock:
            return dict(self._requests)

    def count(self, operation: str, number: int = 1) -> None:
        """Count requests; for whoever sends them past this client."""
        with self._lock:
            self._requests[operation] += number

    def path(self, key: str) -> str:
        """The object's name in the bucket."""
        return self._prefix + key

    def head(self, key: str) -> ObjectMeta | None:
        """What is stored under the key, None when nothing is. Raises StorageError."""
        self.count("HEAD")
        try:
            found: ObjectMeta = self._obstore.head(self._quick, self.path(key))
        except FileNotFoundError:
            return None
        except Exception as error:
            raise translate(error, "looking up an object") from None
        return found

    def read_small(self, key: str) -> tuple[bytes, datetime] | None:
        """The object's bytes and when it was stored, None when it is not there. Raises StorageError."""
        self.count("GET")
        try:
            found = self._obstore.get(self._quick, self.path(key))
            stored_at: datetime = found.meta["last_modified"]
            return bytes(found.bytes()), stored_at
        except FileNotFoundError as error:
            _check_bucket(error, "reading an object")
            return None
        except Exception as error:
            raise translate(error, "reading an object") from None

    def open(self, key: str) -> GetResult | None:
        """A page to be read in pieces, None when it is not there. Raises StorageError."""
        self.count("GET")
        try:
            found: GetResult = self._obstore.get(self._pages, self.path(key))
        except FileNotFoundError as error:
            _check_bucket(error, "reading a page")
            return None
        except Exception as error:
            raise translate(error, "reading a page") from None
        return found

    def put(self, key: str, body: bytes | memoryview, *, create: bool) -> bool:
        """Store an object in one request; False when ``create`` found one there. Raises StorageError."""
        self.count("PUT")
        try:
            self._obstore.put(
                self._uploads,
                self.path(key),
                body,
                mode="create" if create else "overwrite",
                use_multipart=False,
            )
        except Exception as error:
            meant = translate(error, "storing an object")
            if isinstance(meant, AlreadyThereError):
                return False
            raise meant from None
        return True

    def put_parts(self, key: str, parts: Iterator[bytes], part_size: int) -> None:
        """Store an object in parts, all of ``part_size`` bytes but the last. Raises StorageError.

        It becomes visible as a whole, or not at all; a StorageError raised by ``parts`` comes out.
        """
        sent = 0

        def counted() -> Iterator[bytes]:
            nonlocal sent
            for part in parts:
                sent += 1
                yield part

        try:
            self._obstore.put(
                self._uploads,
                self.path(key),
                counted(),
                use_multipart=True,
                chunk_size=part_size,
                max_concurrency=2,
            )
        except Exception as error:
            raise translate(error, "storing an object in parts") from None
        finally:
            self.count("PUT", sent + 2)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, up to 1000 a request; missing ones are fine. Raises StorageError."""
        self.delete_paths([self.path(key) for key in keys])

    def delete_paths(self, paths: Sequence[str]) -> None:
        """``delete`` by the objects' names in the bucket."""
        for start in range(0, len(paths), LIST_PAGE):
            self.count("DELETE")
            try:
                self._obstore.delete(self._bulk, list(paths[start : start + LIST_PAGE]))
            except FileNotFoundError as error:
                _check_bucket(error, "removing objects")
            except Exception as error:
                raise translate(error, "removing objects") from None

    def list(self, prefix: str = "") -> Iterator[Sequence[ObjectMeta]]:
        """All objects whose key starts with ``prefix/`` (all of ours when empty), some at a time.

        Raises StorageError.
        """
        try:
            for found in self._obstore.list(self._bulk, self.path(prefix) or None, chunk_size=LIST_PAGE):
                self.count("LIST")
                yield found
        except FileNotFoundError as error:
            raise translate(error, "listing objects") from None
        except Exception as error:
            raise translate(error, "listing objects") from None

    def sign(self, method: Any, key: str) -> str:
        """A URL that lets its holder send this one request; a secret. Raises StorageError."""
        try:
            url: str = self._obstore.sign(
                self._pages, method, self.path(key), timedelta(seconds=SIGNED_SECONDS)
            )
        except Exception as error:
            raise translate(error, "signing a request") from None
        return url


def make_store(settings: S3Settings, seconds: float, checksum: str, retries: int = 0) -> S3Store:
    """An obstore store whose requests end after ``seconds``, each try. Raises SettingsError.

    ``retries`` are obstore's own, for what has no deadline: listing and removing.
    """
    options: dict[str, Any] = {
        "allow_http": settings.plain_http,
        "connect_timeout": timedelta(seconds=min(settings.connect_seconds, seconds)),
        "timeout": timedelta(seconds=seconds),
    }
    if settings.ca_file is not None:
        try:
            options["root_certificate"] = settings.ca_file.expanduser().read_bytes()
        except OSError as error:
            raise SettingsError(f"ca_file: {settings.ca_file} cannot be read: {error.strerror}") from None
    if settings.proxy is not None:
        options["proxy_url"] = settings.proxy.get_secret_value()
    config: dict[str, Any] = {
        "virtual_hosted_style_request": not settings.path_style,
        "unsigned_payload": not settings.sign_payload,
        "request_payer": settings.request_payer,
        "s3_express": settings.express,
        "skip_signature": settings.anonymous,
    }
    if settings.endpoint:
        config["endpoint"] = _bucket_endpoint(settings)
    if settings.region:
        config["region"] = settings.region
    if checksum:
        config["checksum_algorithm"] = checksum.upper()
    provider = None
    if settings.profile:
        provider = Profile(settings.profile)
    elif settings.access_key_id is not None:
        provider = _static(settings)
    try:
        made: S3Store = obstore_here().store.S3Store(
            settings.bucket,
            config=config,
            client_options=options,
            retry_config={
                "max_retries": retries,
                "retry_timeout": timedelta(seconds=seconds * (1 + retries)),
            },
            credential_provider=provider,
        )
    except Exception as error:
        raise SettingsError(f"the settings do not make an S3 client ({type(error).__name__})") from None
    return made


def _bucket_endpoint(settings: S3Settings) -> str:
    if settings.path_style:
        return settings.endpoint
    scheme, _, host = settings.endpoint.partition("://")
    return f"{scheme}://{settings.bucket}.{host}"


def _static(settings: S3Settings) -> Any:
    """Keys from the settings, as a provider: given directly, AWS_SESSION_TOKEN would be mixed in."""

    def provide() -> dict[str, object]:
        assert settings.access_key_id is not None
        assert settings.secret_access_key is not None
        token = settings.session_token
        return {
            "access_key_id": settings.access_key_id.get_secret_value(),
            "secret_access_key": settings.secret_access_key.get_secret_value(),
            "token": token.get_secret_value() if token else None,
            "expires_at": None,
        }

    return provide


def _check_bucket(error: FileNotFoundError, doing: str) -> None:
    if "NoSuchBucket" in str(error):
        raise translate(error, doing) from None
