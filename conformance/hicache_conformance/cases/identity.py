"""Identity: pages are shared exactly when every field of two namespaces is equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from hicache_conformance.case import add_case, case
from hicache_conformance.harness import MHA, Harness
from hicache_conformance.oracle import page_content
from hicache_conformance.outcomes import expect, expect_presence, expect_statuses
from hicache_storage import Namespace, Status

OTHER: dict[str, tuple[Any, Any]] = {
    "model": ("org/model", "org/model-v2"),
    "revision": ("5f3a", "5f3b"),
    "epoch": (1, 2),
    "adapter": ("", "sql-lora"),
    "attention": ("mha", "mla"),
    "dtype": ("bfloat16", "float8_e4m3"),
    "object_layout": ("kv,token,layer,head,dim", "kv,layer,token,head,dim"),
    "page_size": (64, 32),
    "layers": ((0, 32), (32, 64)),
    "heads": (8, 4),
    "head_dim": (128, 64),
    "v_head_dim": (128, 512),
    "ranks": ((("tp", 0, 2),), (("tp", 1, 2),)),
    "schema": (1, 2),
}
"""Two values of each field that a deployment could have; the tenant is made up per case."""

REASONS = {
    "model": "Survey A7: ``m/x`` wrote, ``m-x`` read and hit.",
    "revision": "sglang#24758: two checkpoints under one served model name reused each other's pages.",
    "epoch": "sglang#26792: after update_weights, 4,166 stale files were loaded as the new weights' KV.",
    "tenant": "vllm#16016, CVE-2025-46570: a shared prefix cache is a timing side channel between tenants.",
    "adapter": "vllm#44250, LMCache#2961: adapter B hit adapter A's KV.",
    "attention": "An MLA latent vector read as MHA K and V is noise.",
    "dtype": "sglang#33268: keys omit the KV dtype; bf16 and fp8 silently shared entries.",
    "object_layout": "The same bytes in another order of axes are another page.",
    "page_size": "A page of 32 tokens is no page of 64.",
    "layers": "sglang#22607: pipeline stages hold different layers of one page.",
    "heads": "sglang#33651: the heads a rank holds depend on the TP size.",
    "head_dim": "Another geometry with the same product has the same size.",
    "v_head_dim": "Another geometry with the same product has the same size.",
    "ranks": "sglang#10969: NIXL ignored tp_rank; ranks overwrote each other's files.",
    "schema": "Another version of the header or of this record cannot be read as this one.",
}


def _apart(h: Harness, first: Namespace, second: Namespace) -> None:
    """Pages of the one are never found under the other: in one client, in two, and through the SDK."""
    names = h.names(3)
    client = h.open(first)
    h.store(client, names)
    memory = h.memory(client, 3)
    memory.blank()
    expect_presence(client.batch_exists(second.keys(names)), [False] * 3, "the other's keys, same client")
    statuses = client.batch_get_into(second.keys(names), memory.pages)
    expect_statuses(statuses, [Status.MISSING] * 3, "the other's keys, same client")
    other = h.open(second)
    expect_presence(other.batch_exists(second.keys(names)), [False] * 3, "a client of the other")
    h.check(other, names, [Status.MISSING] * 3)
    h.check(h.stack(namespace=second), names, [Status.MISSING] * 3)
    h.check(client, names)


def _field_case(name: str) -> None:
    def run(h: Harness) -> None:
        values = OTHER.get(name, (h.namespace.tenant, f"{h.namespace.tenant}2"))
        first, second = (replace(h.namespace, **{name: value}) for value in values)
        _apart(h, first, second)
        _apart(h, second, first)

    add_case(
        "identity",
        f"field_{name}",
        run,
        f"Two namespaces that differ in ``{name}`` alone share no page.\n\n{REASONS[name]}",
    )


for field in fields(Namespace):
    _field_case(field.name)


@case("identity")
def near_collision_models(h: Harness) -> None:
    """Models whose names a careless escape would merge share no page.

    Survey A1 and A7: ``/`` is flattened to ``-`` in the file names of 0.5.23.
    """
    models = ["m/x", "m-x", "m_x", "M/X", "m/x ", "m//x", "m\\x", "m%2Fx", "m.x", "mx"]
    spaces = [replace(h.namespace, model=model) for model in models]
    _all_apart(h, spaces)


@case("identity")
def ranks_are_disjoint(h: Harness) -> None:
    """Every rank of every parallel axis has pages of its own; none overwrites or reads another's.

    sglang#10969: NIXL ignored tp_rank. sglang#26670: context-parallel ranks raced on one key.
    """
    spaces = [replace(h.namespace, ranks=(("tp", rank, 4),)) for rank in range(4)]
    spaces += [replace(h.namespace, ranks=(("tp", 0, 8),)), replace(h.namespace, ranks=(("cp", 0, 4),))]
    spaces += [replace(h.namespace, ranks=(("tp", 0, 4), ("dcp", rank, 2))) for rank in range(2)]
    spaces += [replace(h.namespace, layers=(16 * stage, 16 * stage + 16)) for stage in range(2)]
    _all_apart(h, spaces)


def _all_apart(h: Harness, spaces: Sequence[Namespace]) -> None:
    """Store one page name in all namespaces, with bytes of each its own; each reads back its own."""
    name = h.names(1)[0]
    clients = [h.open(space) for space in spaces]
    for number, client in enumerate(clients):
        memory = h.memory(client, 1)
        memory.write(0, page_content(f"{name}/{number}", sum(MHA)))
        statuses = client.batch_set_from(client.keys([name]), memory.pages)
        expect_statuses(statuses, [Status.OK], "batch_set_from")
    for number, (client, space) in enumerate(zip(clients, spaces, strict=True)):
        memory = h.memory(client, 1)
        statuses = client.batch_get_into(client.keys([name]), memory.pages)
        expect_statuses(statuses, [Status.OK], f"batch_get_into in {space}")
        expect(memory.content(0), page_content(f"{name}/{number}", sum(MHA)), f"the page in {space}")


@case("identity", needs=("shared",))
def mla_is_shared_by_tensor_ranks(h: Harness) -> None:
    """A namespace without ranks is one on all ranks: what the one writer stores, every rank reads.

    sglang#8865, sglang#31946: an MLA page is the same on every TP rank; storing it once per rank
    takes eight times the room.
    """
    space = replace(h.namespace, attention="mla")
    writer, names = h.open(space), h.names(4)
    h.store(writer, names, (2048,))
    for _ in range(3):
        reader = h.open(replace(space))
        expect_presence(reader.batch_exists(reader.keys(names)), [True] * 4, "another rank's client")
        h.check(reader, names, buffers=(2048,))


@case("identity")
def epoch_bump_forgets(h: Harness) -> None:
    """Bumping the epoch makes every page stored so far a miss at once; going back finds them again.

    sglang#26792: flush_cache after update_weights left the old weights' pages on disk, and served them.
    """
    client = h.open(replace(h.namespace, epoch=3))
    names = h.names(5)
    h.store(client, names)
    bumped = replace(h.namespace, epoch=4)
    expect_presence(client.batch_exists(bumped.keys(names)), [False] * 5, "after the bump")
    h.check(h.stack(namespace=bumped), names, [Status.MISSING] * 5)
    h.check(client, names)
