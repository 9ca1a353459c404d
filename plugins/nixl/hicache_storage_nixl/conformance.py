"""The way round this backend to its files or objects, by which hicache-conformance damages them."""

from __future__ import annotations

from typing import Any

from hicache_storage import HiCacheStorage
from hicache_storage.directory.conformance import DirectoryCorruptor


def corruptor(storage: HiCacheStorage) -> Any:
    """For whichever NIXL plugin the storage uses."""
    return DirectoryCorruptor(storage) if storage.settings.root else ObjectCorruptor(storage)


class ObjectCorruptor:
    """Reads and writes the object of a key with the S3 client boto3."""

    def __init__(self, storage: HiCacheStorage) -> None:
        import boto3  # type: ignore[import-untyped,import-not-found,unused-ignore]

        told = storage.settings.params
        self._bucket = told["bucket"]
        self._prefix = storage.settings.prefix
        self._client = boto3.client(
            "s3",
            endpoint_url=told.get("endpoint_override"),
            region_name=told.get("region", "us-east-1"),
            aws_access_key_id=told.get("access_key"),
            aws_secret_access_key=told.get("secret_key"),
        )

    def read(self, key: str) -> bytes | None:
        """The raw object, frame and header included."""
        try:
            found = self._client.get_object(Bucket=self._bucket, Key=self._prefix + key)
        except self._client.exceptions.NoSuchKey:
            return None
        return bytes(found["Body"].read())

    def write(self, key: str, raw: bytes) -> None:
        """Put these bytes where the object is."""
        self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=raw)
