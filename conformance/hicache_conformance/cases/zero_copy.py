"""Page memory: scattered, unaligned, in several regions; written where it should be and nowhere else."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from typing import Any

from hicache_conformance.case import case
from hicache_conformance.harness import MHA, Harness
from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import expect, expect_statuses, require
from hicache_conformance.pages import GuardedPages
from hicache_storage import Buffer, Status, StorageError

SHAPES = (
    (8192,),
    MHA,
    (1, 4096, 7),
    (4096, 64),
    (512,) * 7,
    (100,) * 160,
    tuple(range(1, 65)),
)
"""Buffer sizes of a page: MLA, MHA, odd ones, and 2 x 80 layers of ``layer_first``."""


@case("zero-copy")
def scattered_pages(h: Harness) -> None:
    """Pages of 1 to 160 buffers come back with every buffer's bytes in their place.

    K and V swapped, or a layer in another's place, passes every check of sizes; iovec lists are cut
    at 1,024 entries by the kernel.
    """
    client = h.open()
    for shape in SHAPES:
        names = h.names(9)
        h.store(client, names, shape)
        h.check(client, names, buffers=shape)


@case("zero-copy")
def another_scatter_list(h: Harness) -> None:
    """The object is the concatenation of its buffers: it can be read into a page cut another way.

    One writer uses layer_first, another page_first: the bytes decide, not the cuts.
    """
    client = h.open()
    names = h.names(4)
    h.store(client, names, (3000, 5192))
    h.check(client, names, buffers=(8192,))
    h.check(client, names, buffers=(1024,) * 8)
    expect(bytes(client.get(client.keys(names[:1])[0]) or b""), page_content(names[0], 8192), "get")


@case("zero-copy")
def unaligned_memory(h: Harness) -> None:
    """Pages at odd addresses and of odd sizes are stored and read like any other.

    O_DIRECT refuses such memory with EINVAL; one rejected write must not disable the tier
    (LMCache#4386).
    """
    client = h.open()
    for misalign in (1, 3, 8, 63, 511):
        names = h.names(3)
        memory = h.filled(client, names, MHA, misalign)
        statuses = client.batch_set_from(client.keys(names), memory.pages)
        expect_statuses(statuses, [Status.OK] * 3, f"batch_set_from {misalign} bytes off")
        h.check(client, names, misalign=misalign)


@case("zero-copy")
def several_regions(h: Harness) -> None:
    """One batch may use pages from several registered regions (pools of a hybrid model)."""
    client = h.open()
    names = h.names(6)
    regions = [h.filled(client, names[i : i + 2]) for i in (0, 2, 4)]
    pages = [page for region in regions for page in region.pages]
    statuses = client.batch_set_from(client.keys(names), pages)
    expect_statuses(statuses, [Status.OK] * 6, "batch_set_from over three regions")
    for region in regions:
        region.blank()
    order = h.rng.sample(range(6), 6)
    keys = client.keys([names[i] for i in order])
    statuses = client.batch_get_into(keys, [pages[i] for i in order])
    expect_statuses(statuses, [Status.OK] * 6, "batch_get_into over three regions")
    for i, name in enumerate(names):
        region = regions[i // 2]
        expect(region.content(i % 2), page_content(name, sum(MHA)), f"page {i}")
        require(region.guards_intact(), "batch_get_into wrote outside the pages")


@case("zero-copy")
def nothing_outside_the_pages(h: Harness) -> None:
    """A batch that hits, misses and finds wrong sizes writes only inside pages that it answers OK for,
    and inside the others' own buffers.

    A transfer that trusts the stored length overruns the page when the object is longer (survey A7:
    lengths were never checked against the target).
    """
    client = h.open()
    names = h.names(8)
    h.store(client, names[:4])
    h.store(client, names[4:6], (6000, 6000))
    memory = h.memory(client, 8)
    memory.blank()
    client.batch_get_into(client.keys(names), memory.pages)
    require(memory.guards_intact(), "batch_get_into wrote outside the pages")


@case("zero-copy")
def source_is_never_modified(h: Harness) -> None:
    """batch_set_from and set leave the memory that they store exactly as it was.

    A backend that pads, encrypts or byte-swaps in place corrupts L2, and with it what L1 loads next.
    """
    client = h.open()
    names = h.names(6)
    memory = h.filled(client, names, (4096, 1000))
    before = memory.fingerprint()
    for _ in range(2):  # the second time the keys are there already
        client.batch_set_from(client.keys(names), memory.pages)
        expect(memory.fingerprint(), before, "fingerprint of the source after batch_set_from")
    client.set(client.keys(h.names(1))[0], memory.pages[0][0].view)
    expect(memory.fingerprint(), before, "fingerprint of the source after set")


@case("zero-copy")
def unregistered_memory(h: Harness) -> None:
    """Pages outside all registered memory work, or are refused in clear; never wrong, never a crash.

    After a refusal, pages in registered memory work as before.
    """
    client = h.open()
    names = h.names(4)
    h.store(client, names[:2])
    strange = GuardedPages(4, MHA)
    for number, name in enumerate(names):
        strange.write(number, page_content(name, sum(MHA)))
    try:
        statuses = client.batch_set_from(client.keys(names), strange.pages)
        expect_statuses(statuses, [{Status.OK, Status.FAILED}] * 4, "batch_set_from")
    except StorageError as error:
        require(str(error), "the refusal of unregistered memory says nothing")
    strange.blank()
    try:
        statuses = client.batch_get_into(client.keys(names), strange.pages)
    except StorageError as error:
        require(str(error), "the refusal of unregistered memory says nothing")
        statuses = []
    for number, status in enumerate(statuses):
        if status:
            expect(strange.content(number), page_content(names[number], sum(MHA)), f"page {number}")
    require(strange.guards_intact(), "something was written outside the pages")
    h.check(client, names[:2])


@case("zero-copy")
def registering_again(h: Harness) -> None:
    """Memory can be registered, taken back and registered again, by any number of rounds.

    sglang#25173: memory was registered for every transfer; a second registration of a region that
    the library still knows fails on RDMA.
    """
    client = h.open()
    names = h.names(2)
    memory = GuardedPages(2, MHA)
    for round_number in range(20):
        client.register_buffer(memory.region)
        for number, name in enumerate(names):
            memory.write(number, page_content(name, sum(MHA)))
        statuses = client.batch_set_from(client.keys(names), memory.pages)
        expect_statuses(statuses, [Status.OK] * 2, f"batch_set_from, registration {round_number}")
        memory.blank()
        statuses = client.batch_get_into(client.keys(names), memory.pages)
        expect_statuses(statuses, [Status.OK] * 2, f"batch_get_into, registration {round_number}")
        client.unregister_buffer(memory.region)
    expect(memory.content(1), page_content(names[1], sum(MHA)), "page 1 after the last round")


@case("zero-copy")
def unregistered_memory_is_let_go(h: Harness) -> None:
    """After unregister_buffer nothing of the backend keeps the memory alive.

    A registration that leaks pins host memory for good: attach and detach in a loop, and the server
    dies (sglang#25173, sglang#21078).
    """
    client = h.open()
    names = h.names(2)
    memory = GuardedPages(2, MHA)
    owner: Any = memory.region.owner
    alive = weakref.ref(owner)
    del owner
    client.register_buffer(memory.region)
    client.batch_set_from(client.keys(names), memory.pages)
    client.batch_get_into(client.keys(names), memory.pages)
    client.unregister_buffer(memory.region)
    del memory
    gc.collect()
    require(alive() is None, "the backend still holds memory that was unregistered")


@case("zero-copy", needs=("zero_copy",), level="zero-copy")
def reads_without_a_copy(h: Harness) -> None:
    """Reading 32 MiB takes next to no memory: bytes go from the store into the pages.

    sglang#21880: with the data already in host memory, copies took 6.0 s of 12.8 s.
    """
    client = h.open()
    shape = (512 << 10, 512 << 10)
    names = h.names(32)
    h.store(client, names, shape)
    memory = h.memory(client, 32, shape)
    client.batch_get_into(client.keys(names), memory.pages)
    tracing = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        statuses = client.batch_get_into(client.keys(names), memory.pages)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    expect_statuses(statuses, [Status.OK] * 32, "batch_get_into")
    require(peak - before < 1 << 20, f"reading 32 MiB took {peak - before} bytes of Python memory on the way")


@case("zero-copy", needs=("zero_copy",), level="zero-copy")
def large_batch_of_scattered_pages(h: Harness) -> None:
    """A full batch of 128 pages of 2 x 32 layer buffers moves there and back, byte for byte."""
    client = h.open()
    shape = (1024,) * 64
    names = h.names(128)
    h.store(client, names, shape)
    h.check(client, names, buffers=shape)


@case("zero-copy")
def overlapping_pages_of_one_source(h: Harness) -> None:
    """Two keys may be set from the same memory, and one region may hold source and target pages."""
    client = h.open()
    names = h.names(2)
    memory = h.memory(client, 3)
    memory.write(0, page_content(names[0], sum(MHA)))
    keys = client.keys(names)
    statuses = client.batch_set_from(keys, [memory.pages[0], memory.pages[0]])
    expect_statuses(statuses, [Status.OK] * 2, "batch_set_from twice from one page")
    statuses = client.batch_get_into(keys, memory.pages[1:])
    expect_statuses(statuses, [Status.OK] * 2, "batch_get_into beside the source")
    for number in range(3):
        expect(memory.content(number), page_content(names[0], sum(MHA)), f"page {number}")


@case("zero-copy")
def buffers_without_an_owner(h: Harness) -> None:
    """A Buffer that is only an address and a length, as engines hand them over, works like any other."""
    client = h.open()
    names = h.names(2)
    memory = h.filled(client, names)
    bare = [tuple(Buffer(b.address, b.nbytes) for b in page) for page in memory.pages]
    statuses = client.batch_set_from(client.keys(names), bare)
    expect_statuses(statuses, [Status.OK] * 2, "batch_set_from")
    memory.blank()
    statuses = client.batch_get_into(client.keys(names), bare)
    expect_statuses(statuses, [Status.OK] * 2, "batch_get_into")
    for number, name in enumerate(names):
        expect(memory.content(number), page_content(name, sum(MHA)), f"page {number}")
