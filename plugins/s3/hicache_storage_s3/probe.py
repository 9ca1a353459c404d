"""Finds out at start what the store can do, and says clearly what is wrong with it.

One small object is stored in each way that is to be used, listed, read and removed: 9 requests at most.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Literal, TypeAlias
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from hicache_storage.batch_pool import Lease
from hicache_storage.buffers import Buffer
from hicache_storage.errors import (
    AccessDeniedError,
    CorruptError,
    SettingsError,
    StorageError,
    UnavailableError,
)
from hicache_storage_s3.client import Client
from hicache_storage_s3.direct import Direct
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.s3errors import NoSuchBucketError
from hicache_storage_s3.settings import S3Settings
from hicache_storage_s3.wire import PuzzledError

logger = logging.getLogger(__name__)

MOST_SKEW = timedelta(minutes=5)
"""S3 refuses signed requests whose clock is further off than 15 minutes."""

WRONG_CHECKSUM = ("x-amz-checksum-crc64nvme", "AAAAAAAAAAA=")
"""Refused where checksums are verified; AWS refuses it for not being signed, which tells nothing."""

_CREATE_SECONDS = 10.0

Algorithm: TypeAlias = Literal["crc64nvme", "sha256", "off"]


@dataclass(frozen=True, slots=True)
class Abilities:
    """What was found, and why."""

    client: Client
    conditional: bool
    conditional_reason: str
    direct_get: Direct | None
    get_reason: str
    direct_put: Direct | None
    put_reason: str
    checksum: Algorithm
    checksum_reason: str
    clock_offset: timedelta
    """How far the store's clock is ahead of ours, to about a second."""


class Probe:
    """Used once, when a storage is opened."""

    def __init__(self, settings: S3Settings, persistence: Persistence) -> None:
        self._settings = settings
        self._persistence = persistence
        self._client = Client(settings)
        self._key = f".probe/{uuid.uuid4().hex}"
        self._body = bytearray(uuid.uuid4().bytes * 16)
        self._direct: Direct | None = None

    def run(self) -> Abilities:
        """Raises SettingsError, AccessDeniedError, CorruptError or UnavailableError, saying what to mend."""
        self._store_first()
        try:
            checksum, checksum_reason = self._checksum()
            direct_put, put_reason = self._direct_put(checksum)
            conditional, conditional_reason = self._conditional(direct_put)
            offset = self._read_back()
            self._check_list()
            direct_get, get_reason = self._direct_get()
        except BaseException:
            if self._direct is not None:
                self._direct.close()
            raise
        finally:
            self._remove()
        return Abilities(
            client=self._client,
            conditional=conditional,
            conditional_reason=conditional_reason,
            direct_get=direct_get,
            get_reason=get_reason,
            direct_put=direct_put,
            put_reason=put_reason,
            checksum=checksum,
            checksum_reason=checksum_reason,
            clock_offset=offset,
        )

    def _put(self, *, create: bool) -> bool:
        return self._persistence.call(lambda: self._client.put(self._key, bytes(self._body), create=create))

    def _store_first(self) -> None:
        bucket = self._settings.bucket
        try:
            self._put(create=False)
        except NoSuchBucketError:
            if not self._settings.create_bucket:
                raise SettingsError(
                    f"bucket {bucket!r} does not exist; create it, or set create_bucket"
                ) from None
            self._create_bucket()
            self._put(create=False)
        except AccessDeniedError as error:
            raise AccessDeniedError(f"bucket {bucket!r}: {error}") from None

    def _create_bucket(self) -> None:
        url = urlsplit(Client(self._settings.model_copy(update={"prefix": ""})).sign("PUT", ""))
        connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = connect(url.netloc, timeout=_CREATE_SECONDS)
        try:
            connection.request("PUT", f"{url.path}?{url.query}")
            status = connection.getresponse().status
        except OSError as error:
            raise UnavailableError(f"the bucket could not be created: {type(error).__name__}") from None
        finally:
            connection.close()
        if status != 200:
            raise SettingsError(
                f"bucket {self._settings.bucket!r} could not be created ({status}); create it by other means"
            )
        logger.warning("created bucket %r", self._settings.bucket)

    def _checksum(self) -> tuple[Algorithm, str]:
        wish = self._settings.checksum
        if wish == "off" or self._settings.direct_put == "on":
            return "off", "switched off"
        algorithm: Algorithm = "crc64nvme" if wish == "auto" else wish
        self._client.send_checksum(algorithm)
        try:
            self._put(create=False)
        except StorageError as error:
            if wish != "auto":
                raise SettingsError(f"checksum: {error}") from None
            self._client.send_checksum("")
            return "off", str(error)
        if wish != "auto":
            return algorithm, "as it was told"
        try:
            self._put_presigned(WRONG_CHECKSUM)
        except (PuzzledError, StorageError) as error:
            return algorithm, f"{error} for a wrong one"
        self._client.send_checksum("")
        return "off", "the store takes a wrong one"

    def _direct_put(self, checksum: Algorithm) -> tuple[Direct | None, str]:
        settings = self._settings
        if settings.direct_put == "off":
            return None, "switched off"
        if settings.direct_put == "auto":
            if checksum != "off":
                return None, "a presigned request carries no checksum"
            if settings.sign_payload or not settings.plain_http:
                return None, "better over TLS, and where payloads are signed"
        try:
            self._put_presigned()
        except (PuzzledError, StorageError) as error:
            if settings.direct_put == "on":
                raise SettingsError(f"direct_put: {_presigned_gave(error)}") from None
            return None, _presigned_gave(error)
        return self._direct, "presigned requests work"

    def _put_presigned(self, header: tuple[str, str] | None = None, *, create: bool = False) -> bool:
        """Raises PuzzledError or StorageError."""
        self._client.count("PUT")
        url, page = self._sign("PUT"), [Buffer.of(self._body)]
        return self._presigned(url).write_from(url, page, Lease(), create=create, header=header)

    def _sign(self, method: str) -> str:
        if self._settings.anonymous:
            raise PuzzledError("no key to sign with")
        return self._client.sign(method, self._key)

    def _presigned(self, url: str) -> Direct:
        """For presigned requests to that host. Raises PuzzledError where there is a proxy."""
        settings, parts = self._settings, urlsplit(url)
        if settings.proxy or (parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")):
            raise PuzzledError("a proxy comes in between")
        if self._direct is None:
            try:
                self._direct = Direct(settings.connect_seconds, settings.request_seconds, settings.ca_file)
            except (OSError, ssl.SSLError):
                raise SettingsError(f"ca_file: {settings.ca_file} holds no certificates") from None
        return self._direct

    def _conditional(self, direct: Direct | None) -> tuple[bool, str]:
        wish = self._settings.conditional_put
        if wish == "off":
            return False, "switched off"
        try:
            if direct is None:
                works = not self._put(create=True)
            else:
                works = not self._persistence.call(lambda: self._put_presigned(create=True))
            reason = "the store honours If-None-Match" if works else "the store ignores If-None-Match"
        except (PuzzledError, StorageError) as error:
            works, reason = False, str(error)
        if wish == "on" and not works:
            raise SettingsError(f"conditional_put: {reason}")
        return works, reason

    def _read_back(self) -> timedelta:
        found = self._persistence.call(lambda: self._client.read_small(self._key))
        if found is None:
            raise UnavailableError("an object that was just stored is not there: no consistent store")
        body, stored_at = found
        if body != bytes(self._body):
            raise CorruptError("the store returns other bytes than it was given")
        offset = stored_at - datetime.now(timezone.utc)
        if abs(offset) > MOST_SKEW:
            logger.warning(
                "the clocks of this machine and of the store differ by %d s; the store will refuse requests "
                "when it is more than 15 minutes",
                abs(offset).total_seconds(),
            )
        return offset

    def _check_list(self) -> None:
        try:
            listed = [meta["path"] for page in self._client.list(".probe/") for meta in page]
        except AccessDeniedError as error:
            raise AccessDeniedError(
                f"bucket {self._settings.bucket!r}: {error}. Listing (s3:ListBucket) is needed: without it a "
                "missing page cannot be told from a forbidden one"
            ) from None
        if self._client.path(self._key) not in listed:
            raise UnavailableError(
                "an object that was just stored is not listed: the store is not consistent"
            )

    def _direct_get(self) -> tuple[Direct | None, str]:
        wish = self._settings.direct_get
        if wish == "off":
            return None, "switched off"
        reason = self._get_presigned()
        if reason and wish == "on":
            raise SettingsError(f"direct_get: {reason}")
        return (None, reason) if reason else (self._direct, "presigned requests work")

    def _get_presigned(self) -> str:
        """What goes wrong, empty when nothing does."""
        read = bytearray(len(self._body))
        try:
            url = self._sign("GET")
            direct = self._presigned(url)
            self._client.count("GET")
            status = direct.read_into(url, [Buffer.of(read)], Lease())
        except SettingsError:
            raise
        except (PuzzledError, StorageError) as error:
            return _presigned_gave(error)
        return "" if read == self._body else f"a presigned request found {status.value}"

    def _remove(self) -> None:
        try:
            self._client.delete([self._key])
        except StorageError as error:
            logger.warning("the probe object could not be removed: %s", error)


def _presigned_gave(error: Exception) -> str:
    return f"presigned requests: {error}"
