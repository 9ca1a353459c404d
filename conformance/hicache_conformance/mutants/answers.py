"""Wrong answers: hits that are none, misses that are none, answers for another key."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from hicache_conformance.mutants import mutant
from hicache_conformance.native import NativeStorage
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import Capabilities, Namespace, Page, Status, page_nbytes
from hicache_storage.buffers import scatter


@mutant("contract.round_trip", "contract.object_sizes", "contract.a_64_mib_object")
class StoresNothing(ReferenceStorage):
    """set returns without storing (sglang#32503: NIXL silently no-ops)."""

    def set(self, key: str, value: memoryview) -> None:
        pass


@mutant("contract.missing_key")
class TruthyErrno(ReferenceStorage):
    """exists answers a missing key with -ENOENT, which is true."""

    def exists(self, key: str) -> bool:
        return super().exists(key) or -2  # type: ignore[return-value]


@mutant("contract.missing_key")
class ErrorSwallowedAsHit(NativeStorage):
    """A read that finds nothing is OK: the page keeps what was in it."""

    def read_page(self, key: str, page: Page) -> Status:
        super().read_page(key, page)
        return Status.OK


@mutant("contract.exists_says_what_get_does")
class ExistsWithoutContent(ReferenceStorage):
    """exists asks metadata that knows every key (sglang#31315)."""

    def exists(self, key: str) -> bool:  # noqa: ARG002 - it does not look
        return True


@mutant("contract.exists_says_what_get_does", "contract.round_trip")
class ExistsNeverHits(ReferenceStorage):
    """exists looks under another key than set stores (LMCache#3520: 0.0% hits)."""

    def exists(self, key: str) -> bool:
        return f"{key}.bin" in self.store


@mutant("contract.empty_batch")
class EmptyBatchIsNone(ReferenceStorage):
    """A batch without keys returns None."""

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return super().batch_exists(keys) if keys else None  # type: ignore[return-value]


@mutant("contract.mixed_hits_in_order")
class ResultsShiftedByOne(NativeStorage):
    """The statuses of a batch are those of the next key."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = super().batch_get_into(keys, pages)
        return statuses[1:] + statuses[:1]


@mutant("contract.mixed_hits_in_order")
class OneBooleanPerBatch(NativeStorage):
    """A batch is a hit or a miss as a whole (NIXL, survey fact 2)."""

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return [all(super().batch_exists(keys))] * len(keys)


@mutant("contract.duplicate_keys_in_a_batch")
class DropsDuplicates(NativeStorage):
    """A batch is worked off as a dict: of two pages for one key only the last is filled."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        unique = dict(zip(keys, pages, strict=True))
        super().batch_get_into(list(unique), list(unique.values()))
        return [Status.OK if key in self.store else Status.MISSING for key in keys]


@mutant("contract.one_key_and_a_thousand")
class AtMost128Keys(ReferenceStorage):
    """Keys beyond the 128th of a batch are not looked at."""

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        return super().batch_exists(keys[:128]) + [False] * len(keys[128:])


@mutant("contract.setting_again", "stateful.programs_over_the_bare_backend")
class SecondSetFails(ReferenceStorage):
    """set of a present key fails, as an exclusive create does."""

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        present = [key in self.store for key in keys]
        statuses = super().batch_set_from(keys, pages)
        return [Status.FAILED if was else status for was, status in zip(present, statuses, strict=True)]


@mutant("contract.setting_again")
class RetryDuplicates(ReferenceStorage):
    """A repeated set appends to the object (a multipart upload that is retried)."""

    def set(self, key: str, value: memoryview) -> None:
        self.store[key] = self.store.get(key, b"") + bytes(value)


class _Remembering(ReferenceStorage):
    """Remembers the answers of exists, for ever."""

    remembered: bool

    def __init__(self, settings: Any, namespace: Namespace) -> None:
        super().__init__(settings, namespace)
        self._known: dict[str, bool] = {}

    def exists(self, key: str) -> bool:
        if self._known.get(key) is self.remembered:
            return self.remembered
        self._known[key] = super().exists(key)
        return self._known[key]


@mutant("contract.delete_then_set")
class HitCacheNeverExpires(_Remembering):
    """A cache of keys that exist never forgets one (sglang#31315)."""

    remembered = True


@mutant("contract.exists_after_a_miss")
class MissCacheNeverExpires(_Remembering):
    """A cache of keys that are missing never forgets one."""

    remembered = False


@mutant("contract.wrong_size_page_is_not_served", "contract.keys_and_pages_of_different_number")
class ServesAnySize(NativeStorage):
    """A read takes as many bytes as both sides have, and calls it OK (survey A7: bf16 into fp8)."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return [self.read_page(key, page) for key, page in zip(keys, pages, strict=False)]

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        return [self.write_page(key, page) for key, page in zip(keys, pages, strict=False)]

    def read_page(self, key: str, page: Page) -> Status:
        if key not in self.store:
            return Status.MISSING
        nbytes = page_nbytes(page)
        scatter(self.store[key][:nbytes].ljust(nbytes, b"\0"), page)
        return Status.OK


@mutant("contract.wrong_size_page_is_not_served", "content.bare_backend_survives_damage")
class OneBadPageFailsTheBatch(NativeStorage):
    """An object of a wrong size raises for the whole batch (sglang#39269: OSError: Short read)."""

    def read_page(self, key: str, page: Page) -> Status:
        status = super().read_page(key, page)
        if status is Status.CORRUPT:
            raise OSError("Short read")
        return status


@mutant("contract.read_during_write")
class ExistsBeforeItIsThere(ReferenceStorage):
    """The key is known before its content is stored."""

    def set(self, key: str, value: memoryview) -> None:
        self._coming = key
        time.sleep(0.005)
        super().set(key, value)

    def exists(self, key: str) -> bool:
        return super().exists(key) or key == getattr(self, "_coming", None)


@mutant("contract.read_during_write")
class PublishesHalf(ReferenceStorage):
    """The object grows in place: a reader sees the first half of it (sglang#29969)."""

    def set(self, key: str, value: memoryview) -> None:
        half = len(value) // 2
        self.store.setdefault(key, bytes(value[:half]) + bytes(len(value) - half))
        time.sleep(0.005)
        super().set(key, value)


@mutant("contract.many_threads")
class OneBounceBufferForAll(ReferenceStorage):
    """Every set goes through the one staging buffer of the backend, whoever else is using it."""

    def set(self, key: str, value: memoryview) -> None:
        self._staging = value
        time.sleep(0.0002)
        super().set(key, self._staging)


@mutant("contract.an_object_over_the_limit", "contract.an_empty_object")
class CutsAtItsLimit(ReferenceStorage):
    """Objects over the declared limit are cut, and an empty one is an IndexError."""

    capabilities = Capabilities(delete=True, clear=True, max_object_nbytes=1 << 20)

    def set(self, key: str, value: memoryview) -> None:
        value[0]
        super().set(key, value[: 1 << 20])

    def get(self, key: str) -> bytes | None:
        value = super().get(key)
        return value.ljust((1 << 20) + 1, b"\0") if value and len(value) == 1 << 20 else value
