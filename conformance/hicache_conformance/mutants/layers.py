"""The SDK's layers, one of them missing or broken, over a store that is sound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hicache_conformance.mutants import stack_mutant
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import HiCacheStorage, Page, Status, StorageError, UnavailableError
from hicache_storage.layers.breaker import BreakerLayer
from hicache_storage.layers.layer import Layer
from hicache_storage.layers.naming import NamingLayer
from hicache_storage.open import layered
from hicache_storage.settings import SdkSettings

SAME_SIZE = ("bit_flip", "zero_filled", "zero_tail", "garbage", "swapped", "replayed_from_an_old_epoch")


def _changed(storage: HiCacheStorage, sdk: SdkSettings, name: str, **update: Any) -> HiCacheStorage:
    return layered(storage, sdk.model_copy(update=update), name)


def _find(storage: HiCacheStorage, kind: type[Layer]) -> Any:
    """The layer of this kind in a stack."""
    while not isinstance(storage, kind):
        assert isinstance(storage, Layer)
        storage = storage.inner
    return storage


@stack_mutant(
    *(f"content.{name}" for name in SAME_SIZE),
    "content.get_of_a_damaged_object",
    "content.thousand_corruptions",
    "faults.flaky_backend_never_lies",
    "stateful.programs_through_the_layers",
    "hybrid.a_damaged_sidecar_shortens_the_prefix",
    "engine.flipped_bits_never_reach_l1",
    over=ReferenceStorage,
)
def nothing_is_proved(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Without integrity, as every built-in of 0.5.23: what has the right size is served."""
    return _changed(storage, sdk, name, integrity=False)


@stack_mutant(
    "faults.down_backend_is_a_miss",
    "faults.foreign_exceptions_are_misses",
    "engine.a_dead_store_costs_only_hits",
    over=ReferenceStorage,
)
def errors_reach_the_engine(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Without the breaker: what the backend raises ends SGLang's threads (sglang#38428)."""
    return _changed(storage, sdk, name, breaker=False)


@stack_mutant("faults.nonsense_answers_are_misses", over=ReferenceStorage)
def answers_are_believed(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Without the breaker nobody looks at the kind and number of the answers."""
    return _changed(storage, sdk, name, breaker=False, metrics=False)


@stack_mutant("faults.hung_backend_returns_in_time", over=ReferenceStorage)
def deadlines_far_too_long(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """A deadline that is there and does not matter (dynamo#5012)."""
    return _changed(storage, sdk, name, exists_seconds=3.0, get_seconds=3.0, set_seconds=3.0)


@stack_mutant("faults.slow_backend_still_serves", over=ReferenceStorage)
def deadlines_far_too_short(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """A slow store never gets to answer: writes, but never reads (sglang#12092)."""
    return _changed(storage, sdk, name, exists_seconds=0.005, get_seconds=0.005, set_seconds=0.005)


class _Swallow(Layer):
    """Turns errors into misses, and asks again every time."""

    def batch_exists(self, keys: Sequence[str]) -> list[bool]:
        try:
            return self.inner.batch_exists(keys)
        except StorageError:
            return [False] * len(keys)

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        try:
            return self.inner.batch_get_into(keys, pages)
        except StorageError:
            return [Status.FAILED] * len(keys)

    def batch_set_from(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        try:
            return self.inner.batch_set_from(keys, pages)
        except StorageError:
            return [Status.FAILED] * len(keys)

    def get(self, key: str) -> Any:
        try:
            return self.inner.get(key)
        except StorageError:
            return None


@stack_mutant(
    "faults.hung_backend_opens_the_breaker", "faults.breaker_opens_on_errors", over=ReferenceStorage
)
def never_gives_up(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """A dead store is asked at every request, and every request pays (sglang#31315)."""
    return _Swallow(_changed(storage, sdk, name, breaker=False))


@stack_mutant("faults.breaker_recovers", over=ReferenceStorage)
def gives_up_for_good(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """The store came back, and nobody asks it again."""
    return _changed(storage, sdk, name, breaker_cooldown=3600.0)


@stack_mutant("faults.full_store_refuses_writes_only", over=ReferenceStorage)
def one_circuit_for_all(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Refused writes cut the reads off too (LMCache#4386)."""
    stack = layered(storage, sdk, name)
    breaker = _find(stack, BreakerLayer)
    breaker._reads = breaker._writes  # noqa: SLF001 - that is the mutation
    return stack


class _Hopeful(Layer):
    """Takes a page that failed, or came too late, for one that is there."""

    def batch_get_into(self, keys: Sequence[str], pages: Sequence[Page]) -> list[Status]:
        statuses = self.inner.batch_get_into(keys, pages)
        failed = (Status.FAILED, Status.TIMED_OUT)
        return [Status.OK if status in failed else status for status in statuses]


@stack_mutant("faults.failing_on_the_nth_call", "hybrid.completion_means_all_pools", over=ReferenceStorage)
def failures_count_as_hits(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """A read that failed is reported as done."""
    return _Hopeful(layered(storage, sdk, name))


@stack_mutant("faults.existence_that_lies_is_paid_once", over=ReferenceStorage)
def believes_every_promise(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Without the negative cache, a lie about existence is paid for at every request (sglang#31315)."""
    return _changed(storage, sdk, name, negative_ttl=0.0)


class _Stubborn(Layer):
    """Cannot be closed while a call is under way."""

    def close(self) -> None:
        self.inner.close()
        raise UnavailableError("a transfer is under way")


@stack_mutant("faults.closing_while_it_hangs", over=ReferenceStorage)
def detach_needs_an_idle_store(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """Closing fails while the store hangs (sglang#20101)."""
    return _Stubborn(layered(storage, sdk, name))


class _Unchecked(NamingLayer):
    """Puts names into keys as they are."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self.namespace = _Lenient(self.namespace)  # type: ignore[assignment]


class _Lenient:
    """A namespace that takes any name."""

    def __init__(self, namespace: Any) -> None:
        self._namespace = replace(namespace)

    def key(self, name: str) -> str:
        return f"{self._namespace.digest}/{name}"

    def keys(self, names: Sequence[str]) -> list[str]:
        return [self.key(name) for name in names]


@stack_mutant("contract.hostile_names_are_refused", over=ReferenceStorage)
def names_go_unchecked(storage: HiCacheStorage, sdk: SdkSettings, name: str) -> HiCacheStorage:
    """``../`` and NUL reach the store."""
    stack = layered(storage, sdk, name)
    assert isinstance(stack, NamingLayer)
    return _Unchecked(stack.inner)
