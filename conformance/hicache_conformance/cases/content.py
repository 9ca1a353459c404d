"""Content: objects damaged behind the backend's back are never served, and heal.

All of it through the SDK's layers, since that is what proves content; the backend's part is to
deliver what it has, to answer for each page alone, and to let ``set`` replace what was bad.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hicache_conformance.case import add_case, case
from hicache_conformance.corruptors import Corruptor
from hicache_conformance.harness import Harness
from hicache_conformance.history import Client
from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import BrokenPromiseError, expect, expect_presence
from hicache_storage import CorruptError, Status

BAD = {Status.CORRUPT, Status.MISSING, Status.FAILED}


def _flip(h: Harness, raw: bytes) -> bytes:
    bit = h.rng.randrange(len(raw) * 8)
    damaged = bytearray(raw)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _other_dtype(_: Harness, raw: bytes) -> bytes:
    """What a bf16 page looks like once somebody has rewritten it as fp8 of the same count."""
    return raw[: len(raw) - len(raw) // 2 + 32]


DAMAGES: dict[str, tuple[Callable[[Harness, bytes], bytes], str]] = {
    "bit_flip": (_flip, "A flipped bit anywhere, the header included. No built-in of 0.5.23 checks content."),
    "truncated": (
        lambda h, raw: raw[: h.rng.randrange(len(raw))],
        "sglang#39269: a truncated file raises from get() and could end the prefetch worker.",
    ),
    "extended": (
        lambda h, raw: raw + h.rng.randbytes(h.rng.randrange(1, 5000)),
        "A page that was appended to; LMCache#4533: existence and size are the only checks.",
    ),
    "zero_filled": (
        lambda _, raw: bytes(len(raw)),
        "Survey A7: a zero-filled file of the right length was accepted. What a crash leaves without fsync.",
    ),
    "zero_tail": (
        lambda _, raw: raw[: len(raw) // 2] + bytes(len(raw) - len(raw) // 2),
        "Half of the blocks reached the disk before the power went: full length, zeros at the end.",
    ),
    "other_dtype": (_other_dtype, "sglang#33268: a page of another dtype under the same key."),
    "garbage": (lambda h, raw: h.rng.randbytes(len(raw)), "Mooncake#4239: recycled memory of full size."),
}


def _damaged(h: Harness, stack: Client, change: Callable[[Corruptor, str], None], hit: int) -> None:
    """Damage ``hit`` of six objects: these are misses, the others are served, and the next set heals."""
    backdoor = h.corruptor(stack)
    names = h.names(6)
    keys = h.namespace.keys(names)
    h.store(stack, names)
    bad = sorted(h.rng.sample(range(6), hit))
    for i in bad:
        change(backdoor, keys[i])
        h.history.note(f"the object of page {i} is damaged")
    wanted = [BAD if i in bad else {Status.OK} for i in range(6)]
    for _ in range(2):  # once when it is found, once when it has been dealt with
        h.check(stack, names, wanted)
    h.store(stack, names)
    expect_presence(stack.batch_exists(names), [True] * 6, "after the next set")
    h.check(stack, names)


def _put(h: Harness, backdoor: Corruptor, key: str, damaged: bytes) -> None:
    backdoor.write(key, damaged)
    if backdoor.read(key) != damaged:
        raise h.unsupported("damaged bytes do not stay; the backend needs a corruptor hook")


def _damage_case(name: str) -> None:
    damage, origin = DAMAGES[name]

    def run(h: Harness) -> None:
        def change(backdoor: Corruptor, key: str) -> None:
            _put(h, backdoor, key, damage(h, _object(backdoor, key)))

        stack = h.stack()
        for _ in range(4):
            _damaged(h, stack, change, hit=2)

    what = name.replace("_", " ")
    add_case(
        "content",
        name,
        run,
        f"An object damaged like this ({what}) is a miss; its batch is served; set heals.\n\n{origin}",
    )


def _object(backdoor: Corruptor, key: str) -> bytes:
    raw = backdoor.read(key)
    if not raw:
        raise BrokenPromiseError("the object that was just stored is not where the corruptor looks")
    return raw


for _name in DAMAGES:
    _damage_case(_name)


@case("content")
def swapped(h: Harness) -> None:
    """Two objects that have changed places are two misses: each proves which key it belongs to.

    A recycled slot of a segment or page table holds a right page, of somebody else (Mooncake#1871).
    """
    stack = h.stack()
    backdoor = h.corruptor(stack)
    names = h.names(4)
    keys = h.namespace.keys(names)
    h.store(stack, names)
    first, second = _object(backdoor, keys[0]), _object(backdoor, keys[1])
    _put(h, backdoor, keys[0], second)
    _put(h, backdoor, keys[1], first)
    h.check(stack, names, [BAD, BAD, {Status.OK}, {Status.OK}])
    h.store(stack, names)
    h.check(stack, names)


@case("content")
def replayed_from_an_old_epoch(h: Harness) -> None:
    """An object of the last epoch put under this epoch's key is a miss: it proves its namespace too.

    sglang#26792: a backup that is restored brings the old weights' pages back.
    """
    old = replace(h.namespace, epoch=1)
    new = replace(h.namespace, epoch=2)
    before, names = h.stack(namespace=old), h.names(4)
    h.store(before, names)
    kept = [_object(h.corruptor(before), key) for key in old.keys(names)]
    stack = h.stack(namespace=new)
    h.store(stack, names)
    backdoor = h.corruptor(stack)
    for key, raw in zip(new.keys(names[:2]), kept, strict=False):
        _put(h, backdoor, key, raw)
    h.check(stack, names, [BAD, BAD, {Status.OK}, {Status.OK}])
    h.store(stack, names)
    h.check(stack, names)


@case("content")
def get_of_a_damaged_object(h: Harness) -> None:
    """``get`` of a damaged object through the SDK is None or CorruptError, and works after the next set.

    sglang#39269: the error was raised into the prefetch worker, for ever, since set saw the key.
    """
    stack = h.stack()
    backdoor = h.corruptor(stack)
    for damage, _ in DAMAGES.values():
        name = h.names(1)[0]
        stack.set(name, memoryview(page_content(name, 9000)))
        key = h.namespace.key(name)
        _put(h, backdoor, key, damage(h, _object(backdoor, key)))
        try:
            value = stack.get(name)
        except CorruptError:
            value = None
        expect(value, None, "get of a damaged object")
        stack.set(name, memoryview(page_content(name, 9000)))
        expect(bytes(stack.get(name) or b""), page_content(name, 9000), "get after the next set")


@case("content")
def bare_backend_survives_damage(h: Harness) -> None:
    """Without the SDK in front, an object of a wrong size costs its own page and no other, at every read.

    Survey fact 2: batch_get of 8 pages with one truncated raised, and all 8 were lost (sglang#39269).
    """
    client = h.open()
    backdoor = h.corruptor(client)
    names = h.names(6)
    keys = client.keys(names)
    h.store(client, names)
    _put(h, backdoor, keys[1], _object(backdoor, keys[1])[:-1])
    _put(h, backdoor, keys[4], _object(backdoor, keys[4]) + b"x")
    wanted = [BAD if i in (1, 4) else {Status.OK} for i in range(6)]
    for _ in range(2):
        h.check(client, names, wanted)
    _put(h, backdoor, keys[1], b"")
    h.check(client, names, wanted)


@case("content")
def thousand_corruptions(h: Harness) -> None:
    """Of 1,000 objects damaged in all these ways at random, none is served, and all the others are."""
    stack = h.stack(negative_ttl=0.0)
    backdoor = h.corruptor(stack)
    damages = [damage for damage, _ in DAMAGES.values()]
    shape = (256, 256)
    for _ in range(10):
        names = h.names(128)
        h.store(stack, names, shape)
        bad = set(h.rng.sample(range(128), 100))
        for i, key in enumerate(h.namespace.keys(names)):
            if i in bad:
                backdoor.write(key, h.rng.choice(damages)(h, _object(backdoor, key)))
        h.check(stack, names, [BAD if i in bad else {Status.OK} for i in range(128)], shape)
