"""Runs all ranks in one thread, interleaved by a seed, and says when they part.

Everything that a run does follows from the seed, so a divergence can be replayed step by step.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hicache_conformance.ranks.protocol import Collective, Steps

Place: TypeAlias = tuple[int, int]
"""(tp rank, pp stage)."""


class DivergenceError(AssertionError):
    """Ranks are in different collectives, or came to different results; the message has the steps."""


@dataclass(slots=True)
class Simulation:
    """Ranks of one request, until all have returned."""

    ranks: Mapping[Place, Steps]
    seed: int
    steps: list[str] = field(default_factory=list)
    _waiting: dict[Place, Collective] = field(default_factory=dict)
    _results: dict[Place, int] = field(default_factory=dict)

    def run(self) -> int:
        """The pages that every rank restores. Raises DivergenceError when the ranks part."""
        chooser = random.Random(self.seed)
        ready: dict[Place, int | None] = dict.fromkeys(self.ranks)
        while ready or self._waiting:
            if ready:
                place = chooser.choice(sorted(ready))
                self._advance(place, ready)
            self._meet(ready)
            if not ready and self._waiting:
                stuck = ", ".join(f"{place} in {c.group} {c.what}" for place, c in self._waiting.items())
                raise self._parted(f"no rank can go on: {stuck}; returned: {self._results}")
        if len(set(self._results.values())) > 1:
            raise self._parted(f"ranks restore different prefixes: {self._results}")
        return next(iter(self._results.values()))

    def _advance(self, place: Place, ready: dict[Place, int | None]) -> None:
        """Let one rank go on to its next point."""
        answer = ready.pop(place)
        steps = self.ranks[place]
        try:
            point = next(steps) if answer is None else steps.send(answer)
        except StopIteration as end:
            self._results[place] = end.value
            self.steps.append(f"{place} restores {end.value}")
            return
        if point is None:
            ready[place] = None
            self.steps.append(f"{place} works")
        else:
            self._waiting[place] = point
            self.steps.append(f"{place} enters {point.group} {point.what} with {point.value}")

    def _meet(self, ready: dict[Place, int | None]) -> None:
        """Complete the collectives whose whole group has arrived."""
        for place in sorted(self._waiting):
            collective = self._waiting.get(place)
            if collective is None:
                continue
            axis = 1 if collective.group == "tp" else 0
            group = [other for other in self.ranks if other[axis] == place[axis]]
            waiting = [self._waiting[other] for other in group if other in self._waiting]
            there = [found for found in waiting if found.group == collective.group]
            if len(there) < len(group):
                continue
            kinds = sorted({found.what for found in there})
            if len(kinds) > 1:
                raise self._parted(f"ranks {group} meet in different collectives: {kinds}")
            least = min(found.value for found in there)
            for other in group:
                del self._waiting[other]
                ready[other] = least

    def _parted(self, what: str) -> DivergenceError:
        shown = "\n".join(f"  {number + 1:3d} {step}" for number, step in enumerate(self.steps))
        return DivergenceError(f"seed {self.seed}: {what}\n{shown}")


def find_divergence(simulate: Callable[[int], Simulation], seeds: range) -> DivergenceError | None:
    """The divergence with the fewest steps over these seeds, or None when the ranks always agree."""
    shortest: tuple[int, DivergenceError] | None = None
    for seed in seeds:
        simulation = simulate(seed)
        try:
            simulation.run()
        except DivergenceError as error:
            if shortest is None or len(simulation.steps) < shortest[0]:
                shortest = (len(simulation.steps), error)
    return shortest[1] if shortest else None
