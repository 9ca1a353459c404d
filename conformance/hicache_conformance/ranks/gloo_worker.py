"""Real processes, one a rank: the protocol over torch.distributed, the backend as each one's L3.

Run by the group ``ranks`` as ``python -m``: the job is JSON on stdin, the answers are JSON on stdout.
Ranks are forked before anything is opened, so that PyTorch is imported once.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from hicache_conformance.interposers import faulty
from hicache_conformance.ranks.protocol import Agreements, Steps, prefetch
from hicache_conformance.ranks.stored import StoredRank, rank_namespace
from hicache_conformance.target import Target
from hicache_storage import Namespace


def drive(steps: Steps, rng: random.Random) -> int:
    """Run one rank's part of the protocol, its collectives over gloo; the restored pages."""
    import torch
    import torch.distributed as dist

    answer: int | None = None
    while True:
        try:
            point = next(steps) if answer is None else steps.send(answer)
        except StopIteration as end:
            return int(end.value)
        answer = None
        if point is None:
            time.sleep(rng.choice((0.0, 0.0, 0.002)))  # ranks are never equally fast
        elif point.group == "tp":
            value = torch.tensor([point.value])
            dist.all_reduce(value, op=dist.ReduceOp.MIN)
            answer = int(value.item())
        else:
            answer = point.value  # one stage: nobody else to ask


def work(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Store what this rank has, prefetch every request with the others, share the MLA pages."""
    import torch.distributed as dist

    size = job["size"]
    rng = random.Random(f"{job['seed']}/{rank}")
    base = Namespace(model="hicache-conformance", tenant=job["tenant"])
    target = Target(job["backend"], job["table"])
    settings, own = target.settings(Path(job["tmp"]))
    settings = settings.model_copy(update={"negative_ttl": 0.0, "get_seconds": 20.0, "exists_seconds": 20.0})

    def open_stack(namespace: Namespace, faults: Any = None) -> Any:
        backend = target.cls(own, namespace)
        return target.stack(backend if faults is None else faults(backend), settings, job["backend"])

    faults = faulty(seed=rank, page_error_rate=0.1 if rank == 1 else 0.0, delay=0.001 * rank)
    dist.init_process_group(
        "gloo", f"file://{job['meeting']}", rank=rank, world_size=size, timeout=timedelta(seconds=20)
    )
    with open_stack(rank_namespace(base, rank, size), faults) as storage:
        mine = StoredRank(storage, f"tp{rank}", rng)
        own_hits, restored = [], []
        for number, hashes in enumerate(job["requests"]):
            whole = number % 3 != 0
            for _ in range(1 + whole):  # what fails once is stored the second time
                mine.store(hashes if whole else hashes[: rng.randrange(len(hashes) + 1)])
            own_hits.append(mine.hit(hashes))
            restored.append(drive(prefetch(mine, hashes, Agreements()), rng))
        mine.release()
    with open_stack(replace(base, attention="mla")) as storage:
        shared = StoredRank(storage, "mla", rng)
        written = shared.store(job["mla"]) if rank == 0 else 0
        dist.barrier()
        readable = sum(shared.read(page_hash) for page_hash in job["mla"]) if job["shared"] else 0
        shared.release()
    dist.barrier()
    dist.destroy_process_group()
    return {"hits": own_hits, "restored": restored, "written": written, "readable": readable}


def main() -> None:
    """Fork the ranks, answer with a list of what they say."""
    import torch.distributed  # noqa: F401 - once, before the ranks are forked

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = json.load(sys.stdin)
    pipes = [_fork(job, rank) for rank in range(job["size"])]
    json.dump([json.loads(pipe.read() or "null") for pipe in pipes], answers)
    answers.close()


def _fork(job: dict[str, Any], rank: int) -> TextIO:
    """Start one rank; what it says, which is nothing when it fails."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        try:
            os.close(ours)
            os.write(theirs, json.dumps(work(job, rank)).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(theirs)
    return os.fdopen(ours)


if __name__ == "__main__":
    main()
