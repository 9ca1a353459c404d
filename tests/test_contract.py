"""What a three-method backend gets for free."""

import pytest

from hicache_conformance.pages import GuardedPages
from hicache_conformance.reference import ReferenceStorage
from hicache_storage import (
    BufferMismatchError,
    CapacityError,
    DeadlineError,
    HiCacheStorage,
    Namespace,
    Status,
    StorageError,
    UnsupportedError,
)
from hicache_storage.storage import batches


@pytest.fixture
def storage():
    return ReferenceStorage(None, Namespace(model="m"))


def stored(storage, keys, pages):
    assert all(storage.batch_set_from(keys, pages))


def test_a_batch_moves_scattered_pages_there_and_back(storage):
    memory = GuardedPages(3, [1, 4096, 7])
    memory.fill(seed=1)
    written = [memory.content(i) for i in range(3)]
    stored(storage, ["a", "b", "c"], memory.pages)
    memory.blank()
    assert storage.batch_get_into(["a", "b", "c"], memory.pages) == [Status.OK] * 3
    assert [memory.content(i) for i in range(3)] == written
    assert memory.guards_intact()


def test_every_key_of_a_batch_gets_its_own_answer(storage):
    memory = GuardedPages(3, [64])
    memory.fill(seed=2)
    stored(storage, ["a", "c"], [memory.pages[0], memory.pages[2]])
    storage.store["c"] = b"short"
    assert storage.batch_exists(["a", "b", "c"]) == [True, False, True]
    assert storage.batch_get_into(["a", "b", "c"], memory.pages) == [
        Status.OK,
        Status.MISSING,
        Status.CORRUPT,
    ]


class Raising(ReferenceStorage):
    """Fails for one key, in the way that the test gives."""

    error: StorageError

    def get(self, key):
        if key == "bad":
            raise self.error
        return super().get(key)

    def set(self, key, value):
        if key == "bad":
            raise self.error
        super().set(key, value)


@pytest.mark.parametrize(
    ("error", "status"), [(CapacityError("full"), Status.FAILED), (DeadlineError("late"), Status.TIMED_OUT)]
)
def test_one_failing_page_costs_only_itself(error, status):
    storage = Raising(None, Namespace())
    storage.error = error
    memory = GuardedPages(3, [64])
    assert storage.batch_set_from(["a", "bad", "c"], memory.pages) == [Status.OK, status, Status.OK]
    assert storage.batch_get_into(["a", "bad", "c"], memory.pages) == [Status.OK, status, Status.OK]


def test_only_ok_is_truthy():
    assert [status for status in Status if status] == [Status.OK]


def test_keys_and_pages_of_different_number_are_refused(storage):
    with pytest.raises(BufferMismatchError, match="2 keys but 1 pages"):
        storage.batch_get_into(["a", "b"], GuardedPages(1, [64]).pages)


def test_an_empty_batch_is_answered_with_an_empty_list(storage):
    assert storage.batch_exists([]) == []
    assert storage.batch_get_into([], []) == []
    assert storage.batch_set_from([], []) == []


def test_what_a_backend_does_not_implement_says_so():
    class Least(HiCacheStorage):
        def get(self, key):
            return None

        def exists(self, key):
            return False

        def set(self, key, value):
            pass

    storage = Least(None, Namespace())
    for call in (lambda: storage.delete(["a"]), storage.clear):
        with pytest.raises(UnsupportedError, match="Least"):
            call()
    storage.close()


def test_batches_cover_every_page_once():
    for count in (0, 1, 127, 128, 129, 1000):
        covered = [i for part in batches(count) for i in range(count)[part]]
        assert covered == list(range(count))
