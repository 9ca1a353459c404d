"""Finds out which pages are stored, with far fewer requests than pages.

A page counts as present only when one of these says so:

- the store, asked for this very page (HEAD), now;
- a sighting: within ``positive_seconds``, the store took this page from us, or answered for it and
  it was too young for lifecycle rules;
- a run record, written after its pages were stored and not older than what lifecycle rules leave
  alone (``retention_days``).

Sightings and records hold only while the removal token is the one that was read before the page
was seen: a page that any client of ours has deleted, cleared or collected since is not believed.
Everything else is absent.

Requests of one call: none but the token when all pages were sighted; else the token and up to 4
records at once, then up to 3 more records for what is missing. Pages that are still unknown are
asked one by one, in growing waves, until a whole wave is absent: pages after that count as absent,
since a prefix ends at its first missing page. A few pages are asked one by one at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from functools import partial

from hicache_storage.batch_pool import BatchPool
from hicache_storage.errors import ClosedError, StorageError
from hicache_storage_s3.client import Client
from hicache_storage_s3.parallel import ask
from hicache_storage_s3.removals import Removals
from hicache_storage_s3.retry import Persistence
from hicache_storage_s3.runs import REMEMBER_SECONDS, RecentPages, Run, anchors, decode, encode, record_key
from hicache_storage_s3.settings import S3Settings
from hicache_storage_s3.sightings import Sightings

FEW_PAGES = 8
"""Up to so many unknown pages are asked one by one: records would not save a request."""

FIRST_RECORDS = 4
MORE_RECORDS = 3

_SAFETY = timedelta(seconds=REMEMBER_SECONDS) + timedelta(hours=1)
"""Taken off the age up to which records are believed: the age of their oldest page, and clocks."""


class Lookup:
    """One backend's knowledge of what is stored. Thread-safe."""

    def __init__(
        self,
        settings: S3Settings,
        client: Client,
        persistence: Persistence,
        pool: BatchPool,
        clock_offset: timedelta,
    ) -> None:
        """``clock_offset``: how far the store's clock is ahead of ours."""
        self._client = client
        self._persistence = persistence
        self.pool = pool
        self._offset = clock_offset
        self._believed = timedelta(days=settings.retention_days) - _SAFETY
        self.wave = settings.absent_wave
        self.use_runs = settings.lookup == "runs"
        self.removals = Removals(client, persistence)
        self.sightings = Sightings(
            settings.positive_seconds if self.use_runs else 0.0, settings.positive_keys
        )
        self._recent: dict[str, RecentPages] = {}
        self._lock = threading.Lock()

    def find(self, keys: Sequence[str]) -> list[bool]:
        """Which pages are there, as far as it could be found out.

        Raises StorageError when the store answered for no page at all.
        """
        by_digest: dict[str, dict[str, None]] = {}
        for key in keys:
            by_digest.setdefault(key.partition("/")[0], {})[key] = None
        present: set[str] = set()
        for digest, asked in by_digest.items():
            present |= _Question(self, digest, list(asked)).answer()
        return [key in present for key in keys]

    def stored(self, created: Sequence[str], token: str | None) -> None:
        """Take note of pages created since ``token`` was read.

        Writes a run record when one is due; that may fail, and nothing is lost but requests.
        """
        if token is None or not created:
            return
        self.sightings.add(created, token)
        digest = created[0].partition("/")[0]
        with self._lock:
            recent = self._recent.setdefault(digest, RecentPages())
        due = recent.stored(created, token)
        if due is not None:
            body = encode(due[0])
            ask(
                self.pool,
                [partial(self._client.put, record_key(key), body, create=False) for key in due[1]],
            )

    def token_for_writing(self, digest: str) -> str | None:
        """A removal token read before now, None when there is no use for one, or none to be had."""
        if not self.use_runs:
            return None
        known = self.removals.known(digest)
        if known is not None:
            return known  # an old one makes records that nobody believes, never wrong ones
        return ask(self.pool, [partial(self.removals.read, digest)]).get(0)

    def broken(self, keys: Sequence[str]) -> None:
        """These pages were said to be there and are not: remove the records that said so."""
        records = {sighting.record for sighting in self.sightings.discard(keys)} - {""}
        if records:
            ask(self.pool, [partial(self._client.delete, sorted(records))])

    def read_record(self, anchor: str) -> Run | None:
        """The run record under this anchor, None when there is none to believe. Raises StorageError."""
        found = self._persistence.call(lambda: self._client.read_small(record_key(anchor)))
        if found is None:
            return None
        raw, stored_at = found
        return decode(raw) if self._young(stored_at) else None

    def head(self, key: str) -> bool | None:
        """Ask for one page: whether it is young enough to be remembered, None when it is not there.

        Raises StorageError.
        """
        found = self._persistence.call(lambda: self._client.head(key))
        return None if found is None else self._young(found["last_modified"])

    def _young(self, stored_at: datetime) -> bool:
        return datetime.now(timezone.utc) + self._offset - stored_at < self._believed


class _Question:
    """One call of ``find``, for keys of one namespace."""

    def __init__(self, lookup: Lookup, digest: str, keys: Sequence[str]) -> None:
        self._lookup = lookup
        self._digest = digest
        self._keys = keys
        self._present: set[str] = set()
        self._asked_records: set[str] = set()

    def answer(self) -> set[str]:
        lookup = self._lookup
        sighted = {key: found for key in self._keys if (found := lookup.sightings.find(key))}
        unknown = [key for key in self._keys if key not in sighted]
        use_runs = lookup.use_runs and len(unknown) > FEW_PAGES
        if sighted or use_runs:
            token, runs = self._token_and_records(anchors(unknown, FIRST_RECORDS) if use_runs else [])
            if token is not None:
                self._present.update(key for key, found in sighted.items() if found.token == token)
                self._believe(runs, token)
                left = self._unanswered()
                if use_runs and left and self._present:
                    self._believe(self._records(anchors(left, MORE_RECORDS)), token)
        self._ask_one_by_one(self._unanswered())
        return self._present

    def _unanswered(self) -> list[str]:
        return [key for key in self._keys if key not in self._present]

    def _token_and_records(self, under: Sequence[str]) -> tuple[str | None, dict[str, Run]]:
        lookup = self._lookup
        requests: list[Callable[[], str | Run | None]] = [partial(lookup.removals.read, self._digest)]
        requests += [partial(lookup.read_record, anchor) for anchor in under]
        self._asked_records.update(under)
        answers = ask(lookup.pool, requests)
        token = answers.get(0)
        found = {anchor: answers.get(i) for i, anchor in enumerate(under, 1)}
        runs = {anchor: run for anchor, run in found.items() if isinstance(run, Run)}
        return (token if isinstance(token, str) else None), runs

    def _records(self, under: Sequence[str]) -> dict[str, Run]:
        lookup = self._lookup
        new = [anchor for anchor in under if anchor not in self._asked_records]
        answers = ask(lookup.pool, [partial(lookup.read_record, anchor) for anchor in new])
        return {anchor: run for i, anchor in enumerate(new) if (run := answers.get(i)) is not None}

    def _believe(self, runs: dict[str, Run], token: str) -> None:
        for anchor, run in runs.items():
            if run.digest != self._digest or run.token != token:
                continue
            named = [key for key in self._unanswered() if key.partition("/")[2] in run.names]
            self._present.update(named)
            self._lookup.sightings.add(named, token, record_key(anchor))

    def _ask_one_by_one(self, unknown: Sequence[str]) -> None:
        """HEAD each page, in waves; sightings hold by the token that was known before."""
        wave = self._lookup.wave
        token = self._lookup.removals.known(self._digest)
        start, errors = 0, 0
        while start < len(unknown):
            part = unknown[start : start + wave]
            answers = ask(self._lookup.pool, [partial(self._lookup.head, key) for key in part])
            there, young = [], []
            for i, key in enumerate(part):
                try:
                    remember = answers[i]
                    if remember is not None:
                        there.append(key)
                    if remember:
                        young.append(key)
                except ClosedError:
                    raise
                except StorageError as error:
                    errors += 1
                    last = error
            self._present.update(there)
            self._lookup.sightings.add(young, token)
            if errors == start + len(part) and not self._present:
                raise last
            if not there:
                return
            start += len(part)
            wave *= 2
