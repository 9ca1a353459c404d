"""Removes the pages that were not used for longest.

A small store is sorted as a whole. In a large one a sample of the shards, which hold pages by
hash and so alike, tells which age frees enough; then the shards are swept for pages that old.
Readers that have a page open keep it until they close it (unlink(2)).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from itertools import islice

from hicache_storage.directory.tree import SHARDS, Entry, Tree
from hicache_storage.directory.usage import Usage

logger = logging.getLogger(__name__)

EXACT_PAGES = 20_000
"""Up to so many pages are sorted as a whole: some 4 MB of memory."""

SAMPLE_PAGES = 10_000

_ROUNDS = 4
_FLUSH_PAGES = 256


class Remover:
    """Removes pages one by one and keeps count; a page that cannot be removed stops nothing."""

    def __init__(self, tree: Tree, usage: Usage, dry_run: bool = False, quiet: bool = False) -> None:
        """``quiet``: do not log the first page that cannot be removed, it was said before."""
        self._tree = tree
        self._usage = usage
        self.dry_run = dry_run
        self._quiet = quiet
        self.pages = 0
        self.nbytes = 0
        self.stuck = 0
        """Pages that the file system refused to remove (EPERM, EBUSY, EROFS, EIO)."""

    def remove(self, entry: Entry) -> None:
        """Remove a page, unless it is gone or stuck."""
        if not self.dry_run:
            try:
                if not self._tree.remove(entry):
                    return
            except OSError as error:
                if self.stuck == 0 and not self._quiet:
                    logger.warning("page %s cannot be removed, going on with others: %s", entry.name, error)
                self.stuck += 1
                return
            self._usage.removed(entry.shard, entry.nbytes)
        self.pages += 1
        self.nbytes += entry.nbytes
        if self.pages % _FLUSH_PAGES == 0:
            self._usage.totals()  # others see the room


def free(
    tree: Tree,
    usage: Usage,
    nbytes: int,
    remover: Remover,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Remove the pages used longest ago until ``remover`` has freed ``nbytes`` more."""
    goal = remover.nbytes + nbytes
    total = usage.totals()
    if total.pages <= EXACT_PAGES:
        for entry in sorted(_all(tree, range(SHARDS)), key=lambda entry: entry.used_ns):
            if remover.nbytes >= goal or stopped():
                break
            remover.remove(entry)
    else:
        for _ in range(1 if remover.dry_run else _ROUNDS):
            shards = random.sample(range(SHARDS), SHARDS)
            cutoff_ns = _cutoff(tree, shards, (goal - remover.nbytes) / max(1, usage.totals().nbytes))
            sweep(tree, cutoff_ns, remover, lambda: remover.nbytes >= goal or stopped(), shards)
            if remover.nbytes >= goal or stopped():
                break
    usage.totals()


def sweep(
    tree: Tree,
    cutoff_ns: int,
    remover: Remover,
    stopped: Callable[[], bool] = lambda: False,
    shards: list[int] | range = range(SHARDS),
) -> None:
    """Remove pages that were last used at ``cutoff_ns`` or before."""
    for entry in _all(tree, shards):
        if stopped():
            return
        if entry.used_ns <= cutoff_ns:
            remover.remove(entry)


def _cutoff(tree: Tree, shards: list[int], share: float) -> int:
    """The age, as a time in ns, that ``share`` of all bytes has; estimated from the first shards."""
    sample = sorted((entry.used_ns, entry.nbytes) for entry in islice(_all(tree, shards), SAMPLE_PAGES))
    left = share * sum(nbytes for _, nbytes in sample)
    cutoff_ns = 0
    for used_ns, nbytes in sample:
        cutoff_ns = used_ns
        left -= nbytes
        if left <= 0:
            break
    return cutoff_ns


def _all(tree: Tree, shards: list[int] | range) -> Iterator[Entry]:
    for shard in shards:
        try:
            yield from tree.entries(shard)
        except OSError as error:
            logger.warning("directory %02x cannot be read, going on with others: %s", shard, error)
