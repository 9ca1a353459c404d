"""Neighbouring slots moved as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def runs(
    source: Sequence[int], target: Sequence[int], longest: int | None = None
) -> Iterator[tuple[int, int, int]]:
    """(source slot, target slot, count) of the stretches where both go up by one."""
    start = 0
    for i in range(1, len(source) + 1):
        if (
            i < len(source)
            and source[i] == source[i - 1] + 1
            and target[i] == target[i - 1] + 1
            and i - start != longest
        ):
            continue
        yield source[start], target[start], i - start
        start = i
