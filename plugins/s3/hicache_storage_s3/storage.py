"""The S3 backend: pages as objects, bounded calls, and few requests.

Opening it costs 7 requests, three connection pools, and 4 * ``threads`` threads.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from hicache_storage.batch_pool import BatchPool, Lease
from hicache_storage.buffers import Buffer, Page
from hicache_storage.errors import ClosedError, InvalidKeyError
from hicache_storage.namespace import Namespace, check_name
from hicache_storage.page_hook import page_work
from hicache_storage.storage import Capabilities, HiCacheStorage, Status, check_batch
from hicache_storage_s3.bucket import clear_namespace, delete, remove
from hicache_storage_s3.lookup import Lookup
from hicache_storage_s3.parallel import ask_one
from hicache_storage_s3.probe import Probe
from hicache_storage_s3.reader import Reader
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.settings import S3Settings
from hicache_storage_s3.writer import Doubts, Writer


class S3Storage(HiCacheStorage):
    """Pages in ``settings.bucket``, shared with every process that opens it with the same prefix.

    Thread-safe. It is of no use in a child that was forked after it was opened: calls there raise
    ClosedError, and the child opens its own.
    """

    Settings = S3Settings
    capabilities = Capabilities(
        zero_copy=True,
        bounded=True,
        page_hook=True,
        persistent=True,
        shared=True,
        delete=True,
        clear=True,
    )

    def __init__(self, settings: S3Settings, namespace: Namespace) -> None:
        """Raises SettingsError, AccessDeniedError or UnavailableError that say what to mend."""
        super().__init__(settings, namespace)
        self._opened: _Store | None = _Store(settings)

    def get(self, key: str) -> bytes | None:
        store = self._store(key)
        value = ask_one(store.readers, lambda: store.reader.read(key))
        if value is None:
            store.lookup.broken([key])
        return value

    def exists(self, key: str) -> bool:
        return self.batch_exists([key])[0]

    def set(self, key: str, value: memoryview) -> None:
        store = self._store(key)
        body = bytearray(memoryview(value).cast("B"))  # the caller's memory may be read-only
        store.write([key], [[Buffer.of(body)]], reraise=True)

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return self._store(*keys).lookup.find(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        return self._store(*keys).read(keys, pages)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        check_batch(keys, pages)
        return self._store(*keys).write(keys, pages)

    def delete(self, keys: Sequence[str]) -> None:
        store = self._store(*keys)
        store.doubts.add(keys)  # should removing fail, the next write replaces them
        ask_one(store.writers, lambda: delete(store.client, store.lookup.removals, keys))

    def clear(self) -> None:
        """Remove every page of this namespace; the object that says so stays, 32 bytes.

        Pages that another process stores meanwhile may stay.
        """
        store = self._store()
        remove(store.client, store.lookup.removals, clear_namespace(store.client, self.namespace.digest))

    def describe(self) -> dict[str, str]:
        return self._store().describe()

    def close(self) -> None:
        """End the threads and close the connections. Calls in progress end first."""
        store, self._opened = self._opened, None
        if store is not None and store.pid == os.getpid():
            store.close()

    def _store(self, *keys: str) -> _Store:
        store = self._opened
        if store is None:
            raise ClosedError("the storage is closed")
        if store.pid != os.getpid():
            raise ClosedError("the storage was opened before this process was forked; open one here")
        for key in keys:
            digest, slash, name = key.partition("/")
            if not slash or not digest:
                raise InvalidKeyError(f"{key[:80]!r} is not of the form namespace/name")
            check_name(digest)
            check_name(name)
        return store


class _Store:
    """Everything that is there from opening to closing."""

    def __init__(self, settings: S3Settings) -> None:
        self.pid = os.getpid()
        self._settings = settings
        self._persistence = Persistence(settings.retries)
        found = self._found = Probe(settings, self._persistence).run()
        self.client = found.client
        self.doubts = Doubts()
        # a pool for each of SGLang's threads, so that lookups and reads never wait for writes
        self._lookups = BatchPool(2 * settings.threads, "hicache-s3-lookup")
        self.readers = BatchPool(settings.threads, "hicache-s3-read")
        self.writers = BatchPool(settings.threads, "hicache-s3-write")
        self.lookup = Lookup(settings, self.client, self._persistence, self._lookups, found.clock_offset)
        self.reader = Reader(self.client, self._persistence, found.direct_get)
        self._writer = Writer(
            self.client,
            self._persistence,
            self.doubts,
            found.direct_put,
            conditional=found.conditional,
            part_size=settings.part_size,
        )

    def read(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        arrived = page_work()

        def work(i: int, lease: Lease) -> Status:
            status = self.reader.read_into(keys[i], pages[i], lease)
            if status:
                with lease.held():
                    arrived(i)
            return status

        statuses = self.readers.run(len(keys), work)
        self.doubts.add(key for key, status in zip(keys, statuses, strict=True) if status is Status.CORRUPT)
        missing = [key for key, status in zip(keys, statuses, strict=True) if status is Status.MISSING]
        if missing:
            self.lookup.broken(missing)
        return statuses

    def write(self, keys: Sequence[str], pages: Sequence[Page], *, reraise: bool = False) -> list[Status]:
        """Raises what one page's write raised when asked to."""
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        leaving = page_work()
        errors: list[Exception] = []
        created = [False] * len(keys)
        digests = {key.partition("/")[0] for key in keys}
        token = self.lookup.token_for_writing(keys[0].partition("/")[0]) if len(digests) == 1 else None

        def work(i: int, lease: Lease) -> Status:
            try:
                created[i] = self._writer.write(keys[i], pages[i], lease, lambda: leaving(i))
            except Exception as error:
                errors.append(error)
                raise
            return Status.OK

        todo = sorted(first.values())
        found = self.writers.run(len(todo), lambda i, lease: work(todo[i], lease))
        if reraise and errors:
            raise errors[0]
        by_key = dict(zip((keys[i] for i in todo), found, strict=True))
        self.lookup.stored(
            [keys[i] for i in todo if by_key[keys[i]] and created[i]],
            token,
        )
        return [by_key[key] for key in keys]

    def describe(self) -> dict[str, str]:
        settings, found = self._settings, self._found
        requests = ", ".join(f"{count} {name}" for name, count in sorted(self.client.requests.items()))
        return {
            "bucket": f"{settings.bucket}/{settings.prefix} at {settings.endpoint or 'AWS'}",
            "reads": f"{'straight into L2' if found.direct_get else 'through obstore'}: {found.get_reason}",
            "writes": f"{'straight from L2' if found.direct_put else 'through obstore'}: {found.put_reason}; "
            f"{'' if found.conditional else 'un'}conditional: {found.conditional_reason}",
            "checksum": f"{found.checksum}: {found.checksum_reason}",
            "lookup": f"{settings.lookup}, {len(self.lookup.sightings)} pages known",
            "clock": f"the store is {found.clock_offset.total_seconds():+.0f} s ahead",
            "requests": requests,
            "retries": f"{self._persistence.retried} requests, {self._persistence.slowed} times slowed down",
        }

    def close(self) -> None:
        for pool in (self._lookups, self.readers, self.writers):
            pool.close()
        self.reader.close()
        self._writer.close()
