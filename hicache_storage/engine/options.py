"""The engine's options, by SGLang's names, and the rules by which SGLang changes them.

SGLang 0.5.23 resolves ``--hicache-*`` flags in ``arg_groups/hicache_hook.py`` and goes on with what
it made of them, one line in the log at most. ``resolve`` does the same and says so: it returns the
options in force and a note for each rule that changed one. What no rule mends is an error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hicache_storage.engine.host_memory import check_hugepages
from hicache_storage.engine.layouts import PAGE_FIRST, PAGE_FIRST_DIRECT, find_layout
from hicache_storage.engine.prefetch import PrefetchPolicy
from hicache_storage.engine.transfer import check_io_backend
from hicache_storage.engine.write_policy import WRITE_POLICIES
from hicache_storage.errors import SettingsError

COPIED_BY = {
    "layer_first": ("direct", "kernel"),
    "page_first": ("kernel",),
    "page_first_direct": ("direct",),
    "page_head": ("kernel",),
}
"""The I/O backends that SGLang copies each memory layout with."""

_RULES_OF = "SGLang 0.5.23"


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a TierEngine is opened with, besides its shape and its storage."""

    page_size: int
    """Tokens a page."""
    l1_tokens: int
    """Size of L1; whole pages of it are used."""
    device: str = "cpu"
    """Where L1 is: cpu, or cuda."""
    hicache_ratio: float = 2.0
    """Pages of L2 for each page of L1; L2 must be larger than L1."""
    hicache_size: float | None = None
    """Size of L2 in GB (10**9 bytes) on each rank; overrides ``hicache_ratio``, unless it is 0 (SGLang's
    default)."""
    mem_layout: str = "layer_first"
    """Order of the axes in L2; see ``layouts``."""
    io_backend: str = "direct"
    """How L1 and L2 exchange pages; see ``transfer``."""
    hugepages: str | None = None
    """Back L2 with huge pages of this size (2MB, 1GB), or fail."""
    prefault: bool = False
    """Take all of L2's memory when the engine is opened, not when it is first used. CUDA does anyway."""
    write_policy: str = "write_through"
    """When a page is copied to L2; see ``write_policy``."""
    prefetch_policy: str = "timeout"
    """How long a request waits for L3: not at all (best_effort), until all is there (wait_complete),
    or prefetch_timeout_base + prefetch_timeout_per_ki_token * tokens / 1024 seconds (timeout)."""
    prefetch_threshold: int = 256
    """Fewer tokens than this are computed rather than fetched."""
    prefetch_timeout_base: float = 1.0
    prefetch_timeout_per_ki_token: float = 0.25
    backup_wait: float = 5.0
    """Seconds that a request waits when L2 is full of pages that L3 does not have yet; then the
    oldest of these backups are dropped."""

    @property
    def patience(self) -> PrefetchPolicy:
        """How long a request waits for its prefetch."""
        return PrefetchPolicy(
            self.prefetch_policy,
            self.prefetch_threshold,
            self.prefetch_timeout_base,
            self.prefetch_timeout_per_ki_token,
        )


def resolve(options: EngineOptions) -> tuple[EngineOptions, tuple[str, ...]]:
    """The options in force, and what was changed: a sentence for each rule of SGLang's.

    Raises SettingsError, naming the choices, for options that neither SGLang nor the engine has, and
    for combinations that SGLang accepts and fails on later.
    """
    _check(options)
    notes = []
    if options.mem_layout == PAGE_FIRST_DIRECT.name and options.io_backend == "kernel":
        options = replace(options, io_backend="direct")
        notes.append(
            f"io_backend is direct, not kernel: {_RULES_OF} switches it for mem_layout page_first_direct"
        )
    if options.mem_layout == PAGE_FIRST.name and options.io_backend == "direct":
        options = replace(options, mem_layout=PAGE_FIRST_DIRECT.name)
        notes.append(
            f"mem_layout is page_first_direct, not page_first: {_RULES_OF} switches it for io_backend direct"
        )
    return options, tuple(notes)


def _check(options: EngineOptions) -> None:
    if options.page_size < 1:
        raise SettingsError(f"page_size is at least 1 token, not {options.page_size}")
    if options.write_policy not in WRITE_POLICIES:
        raise SettingsError(f"write_policy {options.write_policy!r} is none of: {', '.join(WRITE_POLICIES)}")
    find_layout(options.mem_layout)
    check_io_backend(options.io_backend)
    check_hugepages(options.hugepages)
    if options.mem_layout == "page_head" and options.io_backend != "kernel":
        raise SettingsError(
            f"mem_layout page_head needs io_backend kernel, not {options.io_backend}: "
            f"{_RULES_OF} accepts them together and fails at the first copy"
        )
    if not (math.isfinite(options.backup_wait) and options.backup_wait >= 0):
        raise SettingsError(f"backup_wait is a number of seconds, 0 or more, not {options.backup_wait}")
    _ = options.patience
