"""Time to first token of a real model, by where the prompt's KV is: the break-even map.

A request is timed from the moment it is known (its prefetch begins) until the logits of its last
token are there. All pages but the last come from the source; the last page is computed, as SGLang
computes it. ``recomputed`` is the same prompt when no tier has any of it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hicache_storage import open_storage
from hicache_storage.engine import KVShape, TierEngine
from hicache_storage.engine.model import ModelCompute, random_llama
from hicache_storage.errors import SettingsError, StorageError
from hicache_storage.storage import HiCacheStorage

SOURCES = ("L1", "L2", "L3", "L3 disk", "recomputed")
"""``L3`` has the page cache warm from writing; for ``L3 disk`` it is told to forget the pages."""

_L2_PER_L1 = 2.5
"""SGLang lets prefetches hold 0.8 of what L2 has more than L1: a whole prompt has to fit."""

_PATIENCE = 600.0
"""Seconds for backups and for one call of the storage."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One prompt length: seconds to the first token by source, medians over the rounds."""

    tokens: int
    seconds: dict[str, float]

    def speed_up(self, source: str) -> float:
        """How many times sooner than by computing."""
        return self.seconds["recomputed"] / self.seconds[source]


class Bench:
    """A model, and an engine whose L3 is the ``file`` backend below ``root``."""

    def __init__(
        self, model: Any, shape: KVShape, page_size: int, tokens: int, device: str, root: Path
    ) -> None:
        self.root = root
        self._vocab = model.config.vocab_size
        self._page_size = page_size
        self._compute = ModelCompute(
            model, shape, page_size, chunk_tokens=-(-tokens // page_size) * page_size
        )
        layout = "page_first_direct"
        seconds = dict.fromkeys(("exists_seconds", "get_seconds", "set_seconds"), _PATIENCE)
        settings = {"root": str(root), **seconds}
        namespace = shape.namespace(page_size, layout, model="random-llama")
        self.storage: HiCacheStorage = open_storage("file", settings, namespace)
        try:
            self._engine = TierEngine(
                shape,
                page_size,
                l1_tokens=-(-tokens // page_size) * page_size,
                device=device,
                hicache_ratio=_L2_PER_L1,
                mem_layout=layout,
                io_backend="direct",
                prefetch_policy="wait_complete",
                prefetch_threshold=page_size,
                backup_wait=_PATIENCE,
                storage=self.storage,
                compute=self._compute,
            )
        except BaseException:
            self.storage.close()
            raise

    def round(self, tokens: int, seed: int) -> dict[str, float]:
        """Seconds to the first token of one prompt, from each source in turn."""
        rng = random.Random(seed)
        prompt = [rng.randrange(self._vocab) for _ in range(tokens)]
        seconds = {"recomputed": self._first_token(prompt, "recomputed")}
        if not self._engine.wait_for_backup(_PATIENCE):
            raise StorageError(f"{tokens} tokens of KV were not stored in {_PATIENCE:.0f} s")
        seconds["L1"] = self._first_token(prompt, "L1")
        self._engine.flush_l1()
        seconds["L2"] = self._first_token(prompt, "L2")
        self._flush()
        seconds["L3"] = self._first_token(prompt, "L3")
        self._flush()
        _forget(self.root)
        seconds["L3 disk"] = self._first_token(prompt, "L3")
        self._flush()
        self.storage.clear()
        return seconds

    def close(self) -> None:
        """End the engine, then the storage."""
        self._engine.close()
        self.storage.close()

    def _flush(self) -> None:
        self._engine.flush_l1()
        self._engine.flush_l2()

    def _first_token(self, prompt: Sequence[int], source: str) -> float:
        began = time.perf_counter()
        report = self._engine.prefill(prompt, self._engine.prefetch(prompt))
        found = {page.value for page in report.sources}
        if found != {source}:
            raise StorageError(
                f"a prompt of {len(prompt)} tokens came from {', '.join(sorted(found))} instead of {source} "
                "alone; has the storage's disk room for it (capacity, min_free)?"
            )
        return self._compute.ready_at - began


def first_tokens(
    shape: KVShape, page_size: int, lengths: Sequence[int], device: str, root: Path, rounds: int
) -> Iterator[FirstToken]:
    """The map, a prompt length at a time. The first prompt of each length only warms up.

    Raises SettingsError for lengths below a page, MemoryError when model or pools do not fit.
    """
    if min(lengths) < page_size:
        raise SettingsError(f"prompts of {min(lengths)} tokens fill no page of {page_size}")
    model = random_llama(shape, device)
    with _opened(model, shape, page_size, max(lengths), device, root) as bench:
        for tokens in lengths:
            bench.round(tokens, seed=0)
            rows = [bench.round(tokens, seed) for seed in range(1, rounds + 1)]
            yield FirstToken(tokens, {source: median(row[source] for row in rows) for source in SOURCES})


def break_even(rows: Sequence[FirstToken], source: str) -> int | None:
    """The fewest tokens from which on ``source`` is never slower than computing; None if it always is."""
    fewest = None
    for row in sorted(rows, key=lambda row: -row.tokens):
        if row.speed_up(source) < 1:
            break
        fewest = row.tokens
    return fewest


@contextmanager
def _opened(
    model: Any, shape: KVShape, page_size: int, tokens: int, device: str, root: Path
) -> Iterator[Bench]:
    try:
        bench = Bench(model, shape, page_size, tokens, device, root)
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error
    try:
        yield bench
    finally:
        bench.close()


def _forget(root: Path) -> None:
    """Have the page cache drop the files below ``root``, which are on the disk then."""
    for path in root.glob("**/*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
