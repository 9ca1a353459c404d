"""How the ranks of a TP x PP grid come to one hit length, written once for all ways to run it.

A rank is a generator: it yields a ``Collective`` where it waits for its group, and gets the minimum
of the group's values back. Every decision that makes a rank take part in another collective, or
not, must be taken on agreed values: SGLang's hangs are ranks that disagree on whether there is a
collective (sglang#30760, sglang#33029, sglang#38284).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

GROUPS = ("tp", "pp")
"""Agreement goes over the tensor-parallel group, then over the pipeline stages."""

THRESHOLD = 2
"""Fewer pages than this are not worth a prefetch: it is revoked."""


@dataclass(frozen=True, slots=True)
class Collective:
    """An all_reduce(MIN) that a rank waits in. ``what`` is for people; gloo matches by order alone."""

    group: str
    what: str
    value: int


@dataclass(frozen=True, slots=True)
class Agreements:
    """Which values ranks agree on; leaving one out is one of the field's bugs."""

    on_hit: bool = True
    """How many pages L3 has. Without: one rank revokes the prefetch, another does not."""
    on_end: bool = True
    """When the transfer is over. Without: each rank stops by its own clock."""
    on_done: bool = True
    """How many pages have come. Without: ranks restore different prefixes."""


class Rank(Protocol):
    """What the protocol needs of a rank's own L3."""

    def hit(self, hashes: Sequence[str]) -> int:
        """Leading pages that L3 has."""

    def read(self, page_hash: str) -> bool:
        """Read one page; whether it came, and was right."""

    def patience(self) -> int:
        """Pages after which this rank's clock says that time is up."""


Steps: TypeAlias = Generator[Collective | None, int, int]
"""A rank at work; None is a point where another rank may go on. Returns the restored pages."""


def prefetch(rank: Rank, hashes: Sequence[str], agreements: Agreements) -> Steps:
    """One request: query, transfer, and how many pages to restore."""
    hit = rank.hit(hashes)
    yield None
    if agreements.on_hit:
        hit = yield from _agree("hit", hit)
    if hit < THRESHOLD:
        return 0
    done, patience = 0, rank.patience()
    for number, page_hash in enumerate(hashes[:hit]):
        yield None
        late = number >= patience
        if late and not agreements.on_end:
            break
        # min over ranks: it is over when it is over for all
        if (yield from _agree(f"end {number}", int(late))):
            break
        if done == number and rank.read(page_hash):
            done += 1
    if agreements.on_done:
        done = yield from _agree("done", done)
    return done


def _agree(what: str, value: int) -> Generator[Collective, int, int]:
    for group in GROUPS:
        value = yield Collective(group, what, value)
    return value
