"""One TP rank in a process of its own: python rank_worker.py RANK SIZE RENDEZVOUS

Each line of stdin is a call, ``{"call": NAME, "args": {...}}``; each answer is one line of
stdout, ``{"result": ...}`` or ``{"error": TRACEBACK}``. It ends with its stdin.
"""

from __future__ import annotations

import cpu_stubs

cpu_stubs.install()

import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from datetime import timedelta  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from real_cache import RealCache  # noqa: E402
from real_pools import CacheSpec  # noqa: E402

COLLECTIVE_TIMEOUT = timedelta(seconds=60)


class Rank:
    """The calls; every rank gets the same ones in the same order, as SGLang's schedulers do."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._cache: RealCache | None = None

    def open(self, spec: dict[str, Any], extra_config: dict[str, Any]) -> dict[str, Any]:
        """What SGLang made of this rank."""
        spec = CacheSpec(**spec, tp_rank=self._rank)
        self._cache = RealCache(spec, "dynamic", extra_config)
        controller = self._cache.controller
        config = controller.storage_config
        return {
            "tp": [config.tp_rank, config.tp_size],
            "is_mla_model": config.is_mla_model,
            "backup_skip": controller.backup_skip,
        }

    def store(self, pages: int) -> int:
        return self._cache.store(self._cache.tokens(pages))

    def forget(self) -> None:
        self._cache.forget()

    def prefetch(self, pages: int) -> int:
        return self._cache.prefetch(self._cache.tokens(pages))

    def load_back(self, pages: int) -> tuple[int, int]:
        return self._cache.load_back(self._cache.tokens(pages))

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()


def _answer(rank: Rank, line: str) -> dict[str, Any]:
    try:
        call = json.loads(line)
        return {"result": getattr(rank, call["call"])(**call["args"])}
    except Exception:
        return {"error": traceback.format_exc()}


def main(rank: int, size: int, rendezvous: Path) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what sglang prints is no answer
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
    )
    calls = Rank(rank)
    for line in sys.stdin:
        print(json.dumps(_answer(calls, line)), file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
