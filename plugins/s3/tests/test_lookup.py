"""Few requests confirm many pages, and no answer is ever wrong."""

import random
import time
from datetime import timedelta

import pytest

from hicache_storage import Status
from hicache_storage_s3 import lookup, runs
from hicache_storage_s3.runs import Run, decode, encode

SIZE = 256


def chain(namespace, count=128, seed=0):
    source = random.Random(f"{namespace.epoch}-{seed}")
    return namespace.keys([source.randbytes(32).hex() for _ in range(count)])


def store(storage, keys, tools, batch=128):
    for start in range(0, len(keys), batch):
        part = keys[start : start + batch]
        assert all(storage.batch_set_from(part, [tools.filled(key, SIZE) for key in part]))


def test_a_stored_prefix_is_confirmed_with_few_requests(opened, namespace, tools):
    keys = chain(namespace)
    store(opened(), keys, tools)
    reader = opened()
    found, sent = tools.sent(reader, lambda: reader.batch_exists(keys))
    assert found == [True] * 128
    assert sum(sent.values()) <= 8
    found, sent = tools.sent(reader, lambda: reader.batch_exists(keys))
    assert found == [True] * 128
    assert sent == {"GET": 1}


@pytest.mark.parametrize("batch", [16, 32, 64, 128])
def test_the_prefix_may_have_been_stored_in_smaller_batches(opened, namespace, tools, batch):
    keys = chain(namespace)
    store(opened(), keys, tools, batch)
    reader = opened()
    found, sent = tools.sent(reader, lambda: reader.batch_exists(keys))
    assert found == [True] * 128
    assert sum(sent.values()) <= 8


def test_the_prefix_may_begin_in_the_middle_of_a_batch(opened, namespace, tools):
    keys = chain(namespace, 256)
    store(opened(), keys, tools)
    reader = opened()
    found, sent = tools.sent(reader, lambda: reader.batch_exists(keys[50:178]))
    assert found == [True] * 128
    assert sum(sent.values()) <= 8


def test_a_prefix_that_is_not_there_costs_few_requests(opened, namespace, tools):
    reader = opened()
    found, sent = tools.sent(reader, lambda: reader.batch_exists(chain(namespace)))
    assert found == [False] * 128
    assert sum(sent.values()) <= 5 + reader.settings.absent_wave


def test_twenty_milliseconds_away_a_lookup_takes_three_round_trips_at_most(opened, namespace, tools, proxy):
    import faulty

    keys = chain(namespace)
    store(opened(), keys, tools)
    reader = opened(endpoint=proxy.url)
    reader.batch_exists(keys[:1])  # opens connections
    proxy.fault = lambda *_: faulty.Fault(delay=0.02)
    best = min(timed(lambda: opened_once(reader, keys)) for _ in range(3))
    assert best < 3 * 0.02 + 0.05  # and some time for the proxy


def opened_once(reader, keys):
    reader._opened.lookup.sightings.discard(keys)
    assert all(reader.batch_exists(keys))


def timed(call):
    began = time.monotonic()
    call()
    return time.monotonic() - began


@pytest.mark.parametrize("how", ["delete", "clear"])
def test_what_another_client_removed_is_absent_at_once(opened, namespace, tools, how):
    keys = chain(namespace)
    writer, reader = opened(), opened()
    store(writer, keys, tools)
    assert all(reader.batch_exists(keys))
    if how == "clear":
        writer.clear()
        assert reader.batch_exists(keys) == [False] * 128
    else:
        writer.delete(keys[40:50])
        wanted = [not 40 <= i < 50 for i in range(128)]
        assert reader.batch_exists(keys) == wanted
        assert opened().batch_exists(keys) == wanted


def test_pages_stored_again_after_a_removal_are_present(opened, namespace, tools):
    keys = chain(namespace)
    writer, reader = opened(), opened()
    store(writer, keys, tools)
    writer.delete(keys[:10])
    store(writer, keys, tools)
    assert reader.batch_exists(keys) == [True] * 128


def test_a_removal_between_two_reads_of_the_token_leaves_no_sighting(opened, namespace, tools, monkeypatch):
    """The page is seen, then removed; the token read afterwards must not vouch for the page."""
    keys = chain(namespace, 4)
    writer, reader = opened(), opened()
    store(writer, keys, tools)
    reader._opened.lookup.removals.read(namespace.digest)
    real = reader._opened.client.head

    def removed_after_it_was_seen(key):
        found = real(key)
        monkeypatch.undo()
        writer.delete(keys)
        return found

    monkeypatch.setattr(reader._opened.client, "head", removed_after_it_was_seen)
    reader.batch_exists(keys[:1])
    assert reader.batch_exists(keys) == [False] * 4


def test_records_older_than_the_retention_are_not_believed(opened, namespace, tools):
    """Lifecycle rules may have removed pages of such a record: each page is asked for."""
    keys = chain(namespace)
    writer = opened()
    store(writer, keys, tools)
    for key in keys[100:]:  # as a lifecycle rule does it: no token changes
        writer._opened.client.delete([key])
    reader = opened()
    reader._opened.lookup._offset += timedelta(days=1) - timedelta(hours=1)
    assert reader.batch_exists(keys) == [True] * 100 + [False] * 28


def test_a_page_old_enough_for_a_rule_is_asked_for_each_time(opened, namespace, tools):
    """A lifecycle rule may remove it at any moment, so having seen it proves nothing."""
    keys = chain(namespace, 4)
    writer = opened()
    store(writer, keys, tools)
    reader = opened()
    reader._opened.lookup._offset += timedelta(days=1)
    for turn in range(2):
        found, sent = tools.sent(reader, lambda: reader.batch_exists(keys))
        assert (found, sent) == ([True] * 4, {"HEAD": 4}), turn
    writer._opened.client.delete(keys[:2])
    assert reader.batch_exists(keys) == [False, False, True, True]


def test_a_client_that_dies_while_it_removes_leaves_nothing_to_believe(opened, namespace, tools, monkeypatch):
    keys = chain(namespace)
    writer, reader = opened(), opened()
    store(writer, keys, tools)
    assert reader.batch_exists(keys) == [True] * 128
    real = writer._opened.client.delete_paths

    def removed_and_died(paths):
        real([path for path in paths if path.endswith(tuple(keys[40:50]))])
        monkeypatch.setattr(writer._opened.lookup.removals, "change", lambda _: None)

    monkeypatch.setattr(writer._opened.client, "delete_paths", removed_and_died)
    writer.clear()
    assert reader.batch_exists(keys) == [not 40 <= i < 50 for i in range(128)]


def test_two_writers_of_one_prefix_leave_few_requests_to_its_readers(opened, namespace, tools):
    """Each page is stored by whoever comes first, as when two servers compute the same prompt."""
    counts = []
    for seed in range(3):
        keys = chain(namespace, seed=seed)
        source = random.Random(seed)
        owners = {key: source.randrange(2) for key in keys}
        for number, writer in enumerate((opened(), opened())):
            mine = [key for key in keys if owners[key] == number]
            assert all(writer.batch_set_from(mine, [tools.filled(key, SIZE) for key in mine]))
        reader = opened()
        found, sent = tools.sent(reader, lambda reader=reader, keys=keys: reader.batch_exists(keys))
        assert found == [True] * 128
        counts.append(sum(sent.values()))
    assert sorted(counts)[1] <= 8, counts  # a hash may fall badly once


def test_a_page_removed_by_strangers_is_a_miss_and_its_record_goes(opened, namespace, tools):
    keys = chain(namespace)
    writer = opened()
    store(writer, keys, tools)
    writer._opened.client.delete(keys[:64])
    reader = opened()
    assert reader.batch_exists(keys) == [True] * 128  # said within the retention: trust, until it breaks
    pages = [tools.empty(SIZE) for _ in keys]
    assert reader.batch_get_into(keys, pages) == [Status.MISSING] * 64 + [Status.OK] * 64
    for _ in range(8):  # each further record that says so goes the same way
        fresh = opened()
        if not any(fresh.batch_exists(keys)[:64]):
            break
        fresh.batch_get_into(keys, pages)
    assert not any(fresh.batch_exists(keys)[:64])


def test_a_second_writer_of_the_same_pages_changes_nothing(opened, namespace, tools):
    keys = chain(namespace)
    first, second = opened(), opened()
    store(first, keys, tools)
    statuses, sent = tools.sent(
        second, lambda: second.batch_set_from(keys, [tools.filled(key, SIZE) for key in keys])
    )
    assert all(statuses)
    assert sent == {"GET": 1, "PUT": 128}  # no HEAD, no record of pages that it did not store
    reader = opened()
    assert reader.batch_exists(keys) == [True] * 128


def test_scattered_pages_are_answered_one_by_one(opened, namespace, tools):
    keys = chain(namespace, 60)
    there = set(random.Random(1).sample(keys, 30))
    writer = opened()
    for key in there:
        store(writer, [key], tools)
    assert opened().batch_exists(keys) == [key in there for key in keys]


def test_lookup_can_be_told_to_ask_for_every_page(opened, namespace, tools):
    keys = chain(namespace, 20)
    store(opened(), keys, tools)
    reader = opened(lookup="head")
    found, sent = tools.sent(reader, lambda: reader.batch_exists(keys))
    assert found == [True] * 20
    assert sent == {"HEAD": 20}


def test_the_positive_cache_is_bounded(opened, namespace, tools):
    keys = chain(namespace, 64)
    storage = opened(positive_keys=10)
    store(storage, keys, tools)
    assert len(storage._opened.lookup.sightings) == 10


def test_a_sighting_ends_with_its_time(opened, namespace, tools, monkeypatch):
    keys = chain(namespace, 4)
    storage = opened()
    store(storage, keys, tools)
    assert all(storage.batch_exists(keys))
    storage._opened.client.delete(keys)  # by somebody else's hand
    later = time.monotonic() + storage.settings.positive_seconds
    monkeypatch.setattr("hicache_storage_s3.sightings.time.monotonic", lambda: later)
    assert storage.batch_exists(keys) == [False] * 4


def test_a_damaged_record_is_no_record():
    raw = encode(Run("d", "t", frozenset({"a", "b"})))
    assert decode(raw) == Run("d", "t", frozenset({"a", "b"}))
    for i in range(len(raw)):
        assert decode(raw[:i]) is None
        assert decode(raw[:i] + bytes([raw[i] ^ 1]) + raw[i + 1 :]) is None
    assert decode(b"") is None


def test_random_programs_never_say_present_of_what_is_absent(opened, namespace, tools):
    """Two writers, three readers, stores and removals: present must be true, absent may be careful."""
    source = random.Random(7)
    keys = chain(namespace, 48)
    clients = [opened(absent_wave=4) for _ in range(3)]
    stored = set()
    for _ in range(60):
        client = source.choice(clients)
        start = source.randrange(len(keys))
        part = keys[start : start + source.randrange(1, 24)]
        what = source.random()
        if what < 0.4:
            store(client, part, tools)
            stored.update(part)
        elif what < 0.6:
            client.delete(part)
            stored.difference_update(part)
        else:
            for key, there in zip(part, client.batch_exists(part), strict=True):
                assert not there or key in stored, key


def test_record_keys_cannot_be_page_keys():
    assert "/." in runs.record_key("digest/name")
    assert lookup.FIRST_RECORDS + lookup.MORE_RECORDS + 1 <= 8
