"""Sizes and contents: from one byte to 64 MiB, with every value a byte can have."""

from __future__ import annotations

from hicache_conformance.case import case
from hicache_conformance.harness import Harness
from hicache_conformance.outcomes import expect, expect_statuses, require
from hicache_storage import Status, StorageError

SIZES = (1, 2, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 65_535, 65_536, 1_048_576, 1_048_577)


@case("contract")
def object_sizes(h: Harness) -> None:
    """Objects of 1 byte to 1 MiB, around every power of two that a device cares about, come back whole.

    O_DIRECT, pages and sectors all have their own idea of a round size (LMCache#4386).
    """
    client = h.open()
    limit = h.capabilities.max_object_nbytes
    for size in SIZES:
        if limit is None or size <= limit:
            names = h.names(2)
            h.store(client, names, (size,))
            h.check(client, names, buffers=(size,))


@case("contract")
def a_64_mib_object(h: Harness) -> None:
    """An object of 64 MiB (a long page of a large model) comes back whole, in a batch with a small one."""
    size = 64 << 20
    client = h.open()
    limit = h.capabilities.max_object_nbytes
    if limit is not None and limit < size:
        raise h.unsupported(f"the backend declares a limit of {limit} bytes an object")
    names = h.names(1)
    h.store(client, names, (size // 2, size // 2))
    h.check(client, names, buffers=(size // 2, size // 2))


@case("contract")
def an_object_over_the_limit(h: Harness) -> None:
    """An object over ``max_object_nbytes`` is refused with a status; it never comes back cut short."""
    limit = h.capabilities.max_object_nbytes
    if limit is None:
        raise h.unsupported("the backend declares no limit of the object size")
    if limit > 256 << 20:
        raise h.unsupported(f"the limit of {limit} bytes is too large to try")
    client = h.open()
    names = h.names(2)
    memory = h.memory(client, 1, (limit + 1,))
    statuses = client.batch_set_from(client.keys(names[:1]), memory.pages)
    expect_statuses(statuses, [{Status.FAILED}], "batch_set_from of an object over the limit")
    h.check(client, names[:1], [Status.MISSING], buffers=(limit + 1,))
    h.store(client, names[1:])


@case("contract")
def every_byte_value(h: Harness) -> None:
    """Bytes are bytes: all 256 values, in every position of a word, and pages of zeros and of ones.

    A store that ends strings at NUL, decodes text or trims blanks loses pages; zeros must come back
    as zeros and not as a hole.
    """
    client = h.open()
    patterns = [
        bytes(range(256)) * 16,
        bytes(4096),
        b"\xff" * 4096,
        b" \t\r\n" * 1024,
        b"\0" + b"x" * 4094 + b"\0",
    ]
    patterns += [bytes((start + 37 * i) & 0xFF for i in range(4096)) for start in range(8)]
    names = h.names(len(patterns))
    memory = h.memory(client, len(patterns), (4000, 96))
    for number, pattern in enumerate(patterns):
        memory.write(number, pattern)
    statuses = client.batch_set_from(client.keys(names), memory.pages)
    expect_statuses(statuses, [Status.OK] * len(names), "batch_set_from")
    memory.blank()
    statuses = client.batch_get_into(client.keys(names), memory.pages)
    expect_statuses(statuses, [Status.OK] * len(names), "batch_get_into")
    for number, pattern in enumerate(patterns):
        expect(memory.content(number), pattern, f"pattern {number}")


@case("contract")
def an_empty_object(h: Harness) -> None:
    """A page of no bytes is an odd request: it is served as such or refused, and harms no other page."""
    client = h.open()
    empty, full = h.names(2)
    try:
        client.set(client.keys([empty])[0], memoryview(b""))
        value = client.get(client.keys([empty])[0])
        require(value is None or len(value) == 0, "an empty object came back with bytes")
    except StorageError as error:
        h.history.note(f"refused: {error}")
    h.store(client, [full])
    h.check(client, [full])
