"""The contract in small: what one thread can see of get, exists, set and their batches."""

from __future__ import annotations

from functools import partial

from hicache_conformance.case import case
from hicache_conformance.harness import MHA, Harness
from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import expect, expect_error, expect_presence, require
from hicache_conformance.pages import GuardedPages
from hicache_storage import BufferMismatchError, InvalidKeyError, Status


@case("contract")
def round_trip(h: Harness) -> None:
    """What was set comes back, byte for byte, by get and by batch.

    A backend that silently stores nothing passes every smoke test (sglang#32503: "if NIXL silently
    no-ops, all five configs stay green").
    """
    client = h.open()
    name = h.names(1)[0]
    key = client.keys([name])[0]
    client.set(key, memoryview(page_content(name, 10_000)))
    value = client.get(key)
    require(value is not None, "get finds nothing after set")
    expect(bytes(value or b""), page_content(name, 10_000), "get after set")
    require(client.exists(key) is True, "exists is not True after set")
    h.check(client, [name], buffers=(6_000, 4_000))


@case("contract")
def missing_key(h: Harness) -> None:
    """A key that was never set is None, False and MISSING, and no error.

    A truthy negative errno counts as a hit in callers that test it with ``if`` (LMCache#3520 is the
    reverse: an exists that never hit).
    """
    client = h.open()
    h.store(client, h.names(3))
    names = h.names(4)
    keys = client.keys(names)
    expect(client.get(keys[0]), None, "get of a missing key")
    require(client.exists(keys[0]) is False, "exists of a missing key is not False")
    expect_presence(client.batch_exists(keys), [False] * 4, "batch_exists of missing keys")
    h.check(client, names, [Status.MISSING] * 4)


@case("contract")
def exists_says_what_get_does(h: Harness) -> None:
    """Each key for which exists is True can be read; each for which it is False was not stored.

    sglang#31315: metadata said present after the only segment had died, and each request paid for
    exists and for the get that timed out. LMCache#3520: exists never hit, 0.0% hit rate.
    """
    client = h.open()
    names = h.names(24)
    stored = [name for name in names if h.rng.random() < 0.5] or names[:1]
    h.store(client, stored)
    keys = client.keys(names)
    wanted = [name in stored for name in names]
    expect_presence(client.batch_exists(keys), wanted, "batch_exists")
    expect_presence([client.exists(key) for key in keys], wanted, "exists, key by key")
    h.check(client, names, [Status.OK if there else Status.MISSING for there in wanted])


@case("contract")
def empty_batch(h: Harness) -> None:
    """A batch of no pages is answered with an empty list."""
    client = h.open()
    expect(client.batch_exists([]), [], "batch_exists of nothing")
    expect(client.batch_get_into([], []), [], "batch_get_into of nothing")
    expect(client.batch_set_from([], []), [], "batch_set_from of nothing")


@case("contract")
def mixed_hits_in_order(h: Harness) -> None:
    """Every key of a batch gets its own answer, in the order of the keys, wherever the misses are.

    NIXL reports one boolean for a whole batch (survey A, fact 2); results shifted by one key serve
    each page under its neighbour's name.
    """
    client = h.open()
    names = h.names(40)
    stored = set(h.rng.sample(names, 20))
    h.store(client, sorted(stored))
    for _ in range(3):
        h.rng.shuffle(names)
        there = [name in stored for name in names]
        expect_presence(client.batch_exists(client.keys(names)), there, "batch_exists")
        h.check(client, names, [Status.OK if hit else Status.MISSING for hit in there])


@case("contract")
def duplicate_keys_in_a_batch(h: Harness) -> None:
    """A key that appears twice in a batch is answered twice, and both pages are filled."""
    client = h.open()
    first, second = h.names(2)
    twice = [first, second, first, first]
    h.store(client, twice)
    expect_presence(client.batch_exists(client.keys(twice)), [True] * 4, "batch_exists of duplicates")
    h.check(client, twice)


@case("contract")
def one_key_and_a_thousand(h: Harness) -> None:
    """Batches of 1, 2, 127, 128, 129 and 1,000 keys are answered in full."""
    client = h.open()
    names = h.names(1000)
    h.store(client, names, (256, 256))
    for count in (1, 2, 127, 128, 129, 1000):
        part = names[:count]
        expect_presence(client.batch_exists(client.keys(part)), [True] * count, f"batch_exists of {count}")
        h.check(client, part, buffers=(256, 256))


@case("contract")
def setting_again(h: Harness) -> None:
    """``set`` of a key that is present succeeds, and the page is as right as before."""
    client = h.open()
    names = h.names(4)
    for _ in range(3):
        h.store(client, names)
        h.check(client, names)


@case("contract", needs=("delete",))
def delete_then_set(h: Harness) -> None:
    """``delete`` removes just the keys it is given; a missing key is fine; set brings a page back.

    A positive cache that never expires goes on to promise what is gone (sglang#31315).
    """
    client = h.open()
    names = h.names(6)
    h.store(client, names)
    expect_presence(client.batch_exists(client.keys(names)), [True] * 6, "before delete")
    client.delete(client.keys([*names[:3], *h.names(2)]))
    expect_presence(client.batch_exists(client.keys(names)), [False] * 3 + [True] * 3, "after delete")
    h.check(client, names, [Status.MISSING] * 3 + [Status.OK] * 3)
    h.store(client, names[:2])
    h.check(client, names[:2])


@case("contract")
def exists_after_a_miss(h: Harness) -> None:
    """A page that was asked for too early is there once it is set: a miss is not remembered."""
    client = h.open()
    names = h.names(3)
    expect_presence(client.batch_exists(client.keys(names)), [False] * 3, "before set")
    h.check(client, names, [Status.MISSING] * 3)
    h.store(client, names)
    expect_presence(client.batch_exists(client.keys(names)), [True] * 3, "after set")
    h.check(client, names)


@case("contract")
def set_copies_what_outlives_the_call(h: Harness) -> None:
    """Once set has returned, the caller's memory is his: changing it changes no stored page."""
    client = h.open()
    names = h.names(4)
    memory = h.store(client, names)
    memory.blank()
    single = h.names(1)[0]
    value = bytearray(page_content(single, 8192))
    client.set(client.keys([single])[0], memoryview(value))
    value[:] = b"\xee" * len(value)
    h.check(client, [*names, single])


@case("contract")
def get_hands_out_no_way_in(h: Harness) -> None:
    """What get returns does not change when the same page is read or set again, or another one is."""
    client = h.open()
    first, second = h.names(2)
    h.store(client, [first, second])
    value = client.get(client.keys([first])[0])
    require(value is not None, "get finds nothing after set")
    client.get(client.keys([second])[0])
    h.store(client, [first, second])
    expect(bytes(value or b""), page_content(first, sum(MHA)), "a value that was read before")


@case("contract")
def wrong_size_page_is_not_served(h: Harness) -> None:
    """A stored object of another size than the page is not OK, and the others of the batch are.

    Survey A7: a bf16 page was served, without complaint, into an fp8-sized target (sglang#33268).
    Survey fact 2: one truncated page of eight made the whole batch raise (sglang#39269).
    """
    client = h.open()
    names = h.names(6)
    h.store(client, names[:2])
    h.store(client, names[2:4], (2048, 2048))
    h.store(client, names[4:], (4096, 4097))
    short, right = {Status.CORRUPT, Status.FAILED, Status.MISSING}, Status.OK
    h.check(client, names, [right, right, short, short, short, short])
    h.check(client, names, [short, short, right, right, short, short], buffers=(2048, 2048))


@case("contract")
def keys_and_pages_of_different_number(h: Harness) -> None:
    """A batch with more keys than pages, or fewer, is refused and not guessed at."""
    client = h.open()
    names = h.names(3)
    memory = h.filled(client, names)
    for call in (client.batch_get_into, client.batch_set_from):
        for keys, pages in ((names, memory.pages[:2]), (names[:1], memory.pages)):
            expect_error(BufferMismatchError, partial(call, client.keys(keys), pages))


@case("contract")
def awkward_names(h: Harness) -> None:
    """Every name that ``check_name`` lets through is a key of its own: long ones, dots, other cases.

    Survey A1: ``/`` flattened to ``-`` made ``m/x`` and ``m-x`` share pages; a connector truncated
    256-bit page hashes to 64 bits.
    """
    client = h.open()
    stem = h.names(1)[0]
    names = [
        *"aA0_-zZ",
        *("a.b", "a-b", "a_b", "a..b", "a.", "a", "b.", "CON", "nul", "-rf", "--", "__", "0", "00", "1e5"),
        *("x" * 200, "x" * 199, "x" * 199 + "y", "Y" * 200),
        *(stem, stem.upper(), f"{stem}.mamba", f"{stem}-mamba", f"{stem[:32]}.swa", "true", "null", "None"),
    ]
    names = list(dict.fromkeys(names))
    h.store(client, names, (128,))
    h.check(client, names, buffers=(128,))


@case("contract")
def near_collisions(h: Harness) -> None:
    """Names that agree in their first, last or middle half are different pages.

    Survey A1: HiCacheKVCM cut 256-bit page hashes to signed 64 bits.
    """
    client = h.open()
    a, b = h.names(2)
    names = [a, b, a[:32] + b[32:], b[:32] + a[32:], a[:16] + b[16:48] + a[48:]]
    names += [a[:-1] + digit for digit in "0123456789abcdef" if digit != a[-1]]
    names += [digit + a[1:] for digit in "0123456789abcdef" if digit != a[0]]
    h.store(client, names, (64, 64))
    h.check(client, names, buffers=(64, 64))


@case("contract")
def hostile_names_are_refused(h: Harness) -> None:
    """Through the SDK, names with separators, control characters or 10,000 characters are refused.

    They must never reach a path, a URL or a shell; nothing is stored, nothing is read.
    """
    stack = h.stack()
    memory = GuardedPages(1, MHA)
    hostile = [
        "",
        ".",
        "..",
        "../x",
        "a/b",
        "a\\b",
        "a\0b",
        "ключ",
        "a b",
        "a\n",
        ".hidden",
        "x" * 10_000,
        "a:b",
    ]
    for name in hostile:
        for call in (
            lambda n=name: stack.batch_exists([n]),
            lambda n=name: stack.batch_get_into([n], memory.pages),
            lambda n=name: stack.batch_set_from([n], memory.pages),
            lambda n=name: stack.get(n),
        ):
            expect_error(InvalidKeyError, call)
