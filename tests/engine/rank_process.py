"""One rank in a process of its own: python rank_process.py FILE_DESCRIPTOR

It takes calls, ``(name, arguments)``, from the connection and answers each with a result or an exception.
It ends with the connection.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import torch

from hicache_storage import open_storage
from hicache_storage.engine import KVShape, TierEngine
from hicache_storage.engine.ranks import GlooRanks, Place
from hicache_storage.engine.side_pools import SidePool

PAGE = 4


class Rank:
    """The calls; every rank gets the same ones in the same order."""

    def __init__(self) -> None:
        self._opened = ExitStack()

    def open(
        self, shape: str, root: str, place: tuple[int, ...], meeting: str, mamba: str | None, **options: Any
    ) -> None:
        """An engine over the file backend in ``root``, and its ranks."""
        timeout = options.pop("timeout", 60.0)
        ranks = GlooRanks(Place(*place), meeting, timeout)
        self._opened.callback(ranks.close)
        pools = [SidePool.mamba(KVShape.parse(mamba))] if mamba else []
        options = {"l1_tokens": 64, "prefetch_policy": "wait_complete", "prefetch_threshold": 1, **options}
        shard_of = {"ranks": ranks, "tp_lcm_size": options.pop("tp_lcm_size", None), "side_pools": pools}
        self._engine = TierEngine(KVShape.parse(shape), PAGE, **shard_of, **options)
        namespace = self._engine.shard.namespace(PAGE, self._engine.options.mem_layout, model="m")
        storage = self._opened.enter_context(
            open_storage("file", {"root": root, "negative_ttl": 0}, namespace)
        )
        self._opened.callback(self._engine.close)
        self._engine.attach(storage)

    def prefill(self, tokens: list[int]) -> tuple[list[str], int]:
        """Where the pages came from, and how many bytes are wrong."""
        report = self._engine.prefill(tokens)
        return [source.value for source in report.sources], report.wrong_bytes

    def forget(self) -> bool:
        """Leave everything in L3; whether all was stored in time."""
        is_stored = self._engine.wait_for_backup(60)
        self._engine.flush_l1()
        self._engine.flush_l2()
        return is_stored

    def close(self) -> None:
        """Close the engine, if one is open."""
        self._opened.close()


def main(descriptor: int) -> None:
    torch.set_num_threads(1)
    connection = Connection(descriptor)
    rank = Rank()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(rank, name)(**arguments)
        except Exception as error:
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        connection.send(answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
