"""The reference tier engine over the backend: L1 and L2 far too small, every page checked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hicache_conformance.case import case
from hicache_conformance.harness import TORCH, Harness
from hicache_conformance.history import Client
from hicache_conformance.interposers import Outage, faulty
from hicache_conformance.outcomes import expect, require

if TYPE_CHECKING:
    from hicache_storage.engine import PrefillReport, TierEngine

PAGE = 4
"""Tokens a page."""
L1_PAGES = 12
SHAPES = ("mha:2x2x8:bf16", "mla:3x64:bf16", "mha:2x1x3:fp8_e4m3")
PREFETCH_POLICIES = ("best_effort", "wait_complete", "timeout")
PATIENT = {"exists_seconds": 20, "get_seconds": 20, "set_seconds": 20}


def _prompts(rng: random.Random, count: int) -> Iterator[list[int]]:
    """Prompts that share prefixes in a tree, of many more pages than L1 and L2 hold."""
    for _ in range(count):
        tokens: list[int] = []
        for _ in range(rng.randint(1, 5)):
            tokens += [1000 * rng.randrange(4) + token for token in range(2 * PAGE)]
        yield tokens + list(range(rng.randrange(PAGE)))


def _engine(h: Harness, shape: str, layout: str, wrap: Any = None, **options: Any) -> TierEngine:
    from hicache_storage.engine import COPIED_BY, KVShape, TierEngine

    parsed = KVShape.parse(shape)
    namespace = parsed.namespace(PAGE, layout, tenant=h.namespace.tenant)
    storage: Client = h.stack(wrap, namespace, **PATIENT)
    engine = TierEngine(
        parsed,
        PAGE,
        storage=storage,
        l1_tokens=L1_PAGES * PAGE,
        mem_layout=layout,
        io_backend=COPIED_BY[layout][0],
        prefetch_threshold=PAGE,
        **{"prefetch_policy": "wait_complete", **options},
    )
    h.defer(engine.close)
    return engine


def _run(engine: TierEngine, prompts: Iterator[list[int]]) -> list[PrefillReport]:
    reports = []
    for tokens in prompts:
        waiting = engine.prefetch(tokens)
        if waiting.operation is not None:
            waiting.operation.done.wait(10)
        reports.append(engine.prefill(tokens, waiting))
    return reports


def _from_l3(reports: list[PrefillReport]) -> int:
    from hicache_storage.engine import Source

    return sum(report.pages(Source.L3) for report in reports)


def _devices() -> list[str]:
    import torch

    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@case("engine", needs=(TORCH,), seconds=120)
def every_layout_shape_and_policy(h: Harness) -> None:
    """Pages pushed out of L1 and L2 come back from L3 byte for byte, in every layout, shape and policy.

    sglang#36179, sglang#30321: repetition loops and garbled text with L3 on; nobody could say which tier.
    """
    from hicache_storage.engine import LAYOUTS

    for device in _devices():
        for layout in LAYOUTS.values():
            shapes = [shape for shape in SHAPES if shape.partition(":")[0] in layout.attentions]
            for number, policy in enumerate(PREFETCH_POLICIES):
                shape = shapes[number % len(shapes)]
                engine = _engine(h, shape, layout.name, prefetch_policy=policy, device=device)
                reports = _run(engine, _prompts(h.rng, 60))
                require(engine.wait_for_backup(30), "backups did not end in 30 s")
                what = f"{layout.name}, {shape}, {policy}, {device}"
                h.history.note(f"{what}: {_from_l3(reports)} pages from L3")
                expect(sum(report.wrong_bytes for report in reports), 0, f"wrong bytes with {what}")
                require(_from_l3(reports) > 0, f"nothing ever came from L3 with {what}")
                require(engine.stats.backup_failed == 0, f"backups failed with {what}: {engine.stats}")
                engine.close()


@case("engine", needs=(TORCH, "persistent"), seconds=60)
def pages_outlive_the_engine(h: Harness) -> None:
    """A new engine over a reopened store is served what the last one has backed up.

    Mooncake#2246: a restart lost the metadata, and all hits with it.
    """
    prompts = list(_prompts(h.rng, 20))
    made: list[Outage] = []

    def wrap(storage: Any) -> Outage:
        made.append(Outage(storage))
        return made[0]

    first = _engine(h, SHAPES[0], "page_first", wrap)
    _run(first, iter(prompts))
    require(first.wait_for_backup(30), "backups did not end in 30 s")
    first.close()
    made[0].close()
    second = _engine(h, SHAPES[0], "page_first")
    reports = _run(second, iter(prompts[:5]))
    expect(sum(report.wrong_bytes for report in reports), 0, "wrong bytes")
    require(_from_l3(reports) > 0, "the second engine got nothing from L3")


@case("engine", needs=(TORCH,), seconds=60)
def flipped_bits_never_reach_l1(h: Harness) -> None:
    """With bits flipped and pages failing between store and engine, no wrong byte gets to L1.

    sglang#32476: a KV canary for L1 and L2 exists because this happens; L3 had none.
    """
    faults = faulty(seed=h.seed, flip_rate=0.2, page_error_rate=0.1)
    engine = _engine(h, SHAPES[0], "layer_first", faults)
    reports = _run(engine, _prompts(h.rng, 80))
    expect(sum(report.wrong_bytes for report in reports), 0, "wrong bytes")


@case("engine", needs=(TORCH,), seconds=60)
def a_dead_store_costs_only_hits(h: Harness) -> None:
    """When the store dies, prefills go on by recomputing, and nothing is raised to the scheduler.

    sglang#38428: a backend's exception killed the backup thread and leaked host memory.
    """
    made: list[Outage] = []

    def wrap(storage: Any) -> Outage:
        made.append(Outage(storage))
        return made[0]

    engine = _engine(h, SHAPES[1], "page_first_direct", wrap, backup_wait=0.1)
    _run(engine, _prompts(h.rng, 20))
    made[0].down()
    reports = _run(engine, _prompts(h.rng, 20))
    expect(sum(report.wrong_bytes for report in reports), 0, "wrong bytes")
    expect(engine.stats.storage_errors, 0, "errors raised into the engine's threads")
