"""Finds out at start what the store can do, and says clearly what is wrong with it.

One small object is stored, stored again, listed, read twice and removed: 7 requests.
"""

from __future__ import annotations

import http.client
import logging
import ssl
import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Literal
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
from hicache_storage_s3.direct import DirectReader, PuzzledError
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.s3errors import NoSuchBucketError
from hicache_storage_s3.settings import S3Settings

logger = logging.getLogger(__name__)

MOST_SKEW = timedelta(minutes=5)
"""S3 refuses signed requests whose clock is further off than 15 minutes."""

_CREATE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Abilities:
    """What was found, and why."""

    client: Client
    """Knows the checksum to send."""
    conditional: bool
    conditional_reason: str
    direct: DirectReader | None
    direct_reason: str
    checksum: str
    clock_offset: timedelta
    """How far the store's clock is ahead of ours, to about a second."""


class Probe:
    """Used once, when a storage is opened."""

    def __init__(self, settings: S3Settings, persistence: Persistence) -> None:
        self._settings = settings
        self._persistence = persistence
        self._client = Client(settings)
        self._key = f".probe/{uuid.uuid4().hex}"
        self._body = uuid.uuid4().bytes * 16

    def run(self) -> Abilities:
        """Raises SettingsError, AccessDeniedError, CorruptError or UnavailableError, saying what to mend."""
        self._store_first()
        try:
            conditional, reason = self._conditional()
            offset = self._read_back()
            self._check_list()
            direct, direct_reason = self._direct()
            client, checksum = self._checksum()
        finally:
            self._remove()
        return Abilities(client, conditional, reason, direct, direct_reason, checksum, offset)

    def _put(self, client: Client, *, create: bool) -> bool:
        return self._persistence.call(lambda: client.put(self._key, self._body, create=create))

    def _store_first(self) -> None:
        bucket = self._settings.bucket
        try:
            self._put(self._client, create=False)
        except NoSuchBucketError:
            if not self._settings.create_bucket:
                raise SettingsError(
                    f"bucket {bucket!r} does not exist; create it, or set create_bucket"
                ) from None
            self._create_bucket()
            self._put(self._client, create=False)
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

    def _conditional(self) -> tuple[bool, str]:
        wish = self._settings.conditional_put
        if wish == "off":
            return False, "switched off"
        try:
            works = not self._put(self._client, create=True)
            reason = "the store honours If-None-Match" if works else "the store ignores If-None-Match"
        except StorageError as error:
            works, reason = False, str(error)
        if wish == "on" and not works:
            raise SettingsError(f"conditional_put: {reason}")
        return works, reason

    def _read_back(self) -> timedelta:
        found = self._persistence.call(lambda: self._client.read_small(self._key))
        if found is None:
            raise UnavailableError("an object that was just stored is not there: no consistent store")
        body, stored_at = found
        if body != self._body:
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

    def _direct(self) -> tuple[DirectReader | None, str]:
        wish = self._settings.direct_get
        if wish == "off":
            return None, "switched off"
        reader, reason = self._try_direct()
        if wish == "on" and reader is None:
            raise SettingsError(f"direct_get: {reason}")
        return reader, reason

    def _try_direct(self) -> tuple[DirectReader | None, str]:
        settings = self._settings
        url = self._client.sign("GET", self._key)
        parts = urlsplit(url)
        if settings.proxy or (parts.scheme in getproxies() and not proxy_bypass(parts.hostname or "")):
            return None, "requests go through a proxy"
        try:
            reader = DirectReader(settings.connect_seconds, settings.request_seconds, settings.ca_file)
        except (OSError, ssl.SSLError):
            raise SettingsError(f"ca_file: {settings.ca_file} holds no certificates") from None
        read = bytearray(len(self._body))
        self._client.count("GET")
        try:
            status = reader.read_into(url, [Buffer.of(read)], Lease())
            reason = f"a presigned request found {status.value}"
        except PuzzledError as error:
            reason = f"the store gave {error} to a presigned request"
        except StorageError as error:
            reason = str(error)
        if bytes(read) == self._body:
            return reader, "presigned requests work"
        reader.close()
        return None, reason

    def _checksum(self) -> tuple[Client, Literal["crc64nvme", "sha256", "off"]]:
        wish = self._settings.checksum
        if wish == "off":
            return self._client, "off"
        algorithm: Literal["crc64nvme", "sha256"] = "crc64nvme" if wish == "auto" else wish
        client = Client(self._settings, algorithm)
        try:
            self._put(client, create=False)
        except StorageError as error:
            if wish != "auto":
                raise SettingsError(f"checksum: {error}") from None
            return self._client, "off"
        return client, algorithm

    def _remove(self) -> None:
        try:
            self._client.delete([self._key])
        except StorageError as error:
            logger.warning("the probe object could not be removed: %s", error)
