"""Ranks of one model that act alike: where each stands, and how they agree.

Each rank has a tree, an L2 and a storage of its own, and these never become equal: backups end at
different times, one rank loses a page that the others have. So nothing is decided by one rank. All
ranks run the same requests in the same order, each says which prefixes it could restore, and they
take the longest that all of them can: an element-wise minimum, as in SGLang (``_all_reduce`` with
MIN in ``managers/cache_controller.py``). A rank that has more computes it again with the others.

The engine's thread and the query thread reduce at the same time, so each has a group of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from hicache_storage.errors import SettingsError

if TYPE_CHECKING:
    from typing_extensions import Self


class RanksError(RuntimeError):
    """The ranks cannot agree any more: one is gone, or they do not run the same requests.

    The engines of all ranks have to be opened anew; every later call says so too.
    """


class Asking(Enum):
    """Which thread asks; each has its own order of calls, the same on all ranks."""

    REQUEST = "request"
    """The thread that runs requests."""
    LOOKUP = "lookup"
    """The query thread of the controller."""


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among ``tp_size`` x ``pp_size``. Raises SettingsError for a place that there is not."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        for axis, rank, size in (("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)):
            if not 0 <= rank < size:
                raise SettingsError(f"{axis} rank {rank} is not one of {size} ranks")

    @property
    def rank(self) -> int:
        """The rank's number: ranks of one pipeline stage are neighbours."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return self.tp_size * self.pp_size

    @classmethod
    def of(cls, rank: int, tp_size: int, pp_size: int = 1) -> Place:
        """The place of rank number ``rank``. Raises SettingsError when there is none."""
        return cls(rank % tp_size, tp_size, rank // tp_size, pp_size)


class Ranks(Protocol):
    """What an engine needs of the other ranks."""

    @property
    def place(self) -> Place:
        """Where this rank stands."""

    def agree(self, asking: Asking, about: str, values: Sequence[int]) -> list[int]:
        """The smallest of each value over all ranks; every rank calls, and all get the same.

        ``about`` names what the call is about, and the values' number follows from it. Raises
        RanksError when a rank does not come in time or is about something else.
        """


class OneRank:
    """A rank that is alone agrees with itself."""

    place = Place()

    def agree(self, asking: Asking, about: str, values: Sequence[int]) -> list[int]:
        """The values."""
        del asking, about
        return list(values)


class GlooRanks:
    """Ranks in processes, over gloo: one group for each thread that asks.

    ``init_method`` is where they meet: ``file:///path`` of a file that is not there yet, or
    ``tcp://host:port``; GLOO_SOCKET_IFNAME picks the network interface. A rank waits ``timeout`` seconds
    for the others, longer than a call of the storage may take, and then for none of them again.

    Raises RanksError when not all ranks meet in time.
    """

    def __init__(self, place: Place, init_method: str, timeout: float = 60.0) -> None:
        self.place = place
        self._timeout = timeout
        self._broken = ""
        try:
            self._groups = _open_groups(place, init_method, timedelta(seconds=timeout))
        except (RuntimeError, ValueError, OSError) as error:
            raise RanksError(f"the {place.count} ranks did not meet at {init_method}: {error}") from error

    def agree(self, asking: Asking, about: str, values: Sequence[int]) -> list[int]:
        """See Ranks. One thread at a time for each of ``asking``."""
        group = self._groups.get(asking)
        if group is None:
            raise RanksError(self._broken)
        try:
            # gloo ends the process when sizes differ, so that is asked first, in a size of its own
            mark = _mark(f"{len(values)} values for {about}")
            is_alike = _minimum(group, [mark, -mark]) == [mark, -mark]
            agreed = _minimum(group, values) if values and is_alike else []
        except RuntimeError as error:
            raise self._break(
                f"rank {self.place.rank} lost the others at {about}: one is gone, or did not come within "
                f"{self._timeout:g} seconds ({error})"
            ) from error
        if not is_alike:
            raise self._break(f"the ranks do not act alike: rank {self.place.rank} is at {about}")
        return agreed

    def close(self) -> None:
        """Leave the groups, after the engine is closed. Ranks that still ask get a RanksError."""
        self._break("the ranks are closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _break(self, reason: str) -> RanksError:
        """Leave the groups, which tells the others at once; calls in progress keep theirs."""
        self._broken = self._broken or reason
        self._groups.clear()
        return RanksError(reason)


def as_flags(lengths: Iterable[int], longest: int) -> list[int]:
    """For each prefix length up to ``longest`` whether it is one of ``lengths``; 0 always is."""
    flags = [1] + [0] * longest
    for length in lengths:
        flags[length] = 1
    return flags


def longest_of(flags: Sequence[int]) -> int:
    """The greatest length whose flag is left."""
    return max(length for length, flag in enumerate(flags) if flag)


def _open_groups(place: Place, init_method: str, timeout: timedelta) -> dict[Asking, Any]:
    store, rank, size = next(rendezvous(init_method, place.rank, place.count, timeout=timeout))
    store.set_timeout(timeout)
    return {
        asking: torch.distributed.ProcessGroupGloo(PrefixStore(asking.value, store), rank, size, timeout)
        for asking in Asking
    }


def _minimum(group: Any, values: Sequence[int]) -> list[int]:
    reduced = torch.tensor(values, dtype=torch.int64)
    options = torch.distributed.AllreduceOptions()
    options.reduceOp = torch.distributed.ReduceOp.MIN  # type: ignore[assignment]
    group.allreduce([reduced], options).wait()
    smallest: list[int] = reduced.tolist()
    return smallest


def _mark(about: str) -> int:
    return int.from_bytes(hashlib.blake2b(about.encode(), digest_size=7).digest(), "big")
