"""L2's memory: one allocation, of the pages that were asked for or none, pinned for CUDA as a whole."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch

from hicache_storage.buffers import Buffer
from hicache_storage.engine.memory_limits import headroom, human, memlock_shortage
from hicache_storage.errors import SettingsError

HUGE_PAGES = {"2MB": 2 << 20, "1GB": 1 << 30}
"""Sizes of huge pages, by the names that SGLang's SGLANG_HUGEPAGE_SIZE has for them."""

_MAP_HUGETLB = 0x40000
_MAP_HUGE_SHIFT = 26
_MAP_POPULATE = 0x8000

_SYSTEM = Path("/sys/kernel/mm/hugepages")


def check_hugepages(name: str | None) -> None:
    """Raise SettingsError naming the choices unless ``name`` is a size of huge pages, or None."""
    if name is not None and name not in HUGE_PAGES:
        raise SettingsError(f"hugepages {name!r} is none of: {', '.join(HUGE_PAGES)}")


def allocate(nbytes: int, hugepages: str | None = None, *, prefault: bool = False) -> mmap.mmap:
    """At least ``nbytes`` of zeros, aligned to their pages.

    With ``hugepages`` they are of that size, or it is an error: SGLang falls back to small pages.
    ``prefault`` takes the memory now, not when it is first touched. Raises MemoryError that names
    the limit which is short and says how to raise it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if prefault:
        flags |= _MAP_POPULATE
    if hugepages is not None:
        return _allocate_huge(nbytes, HUGE_PAGES[hugepages], flags)
    left = headroom()
    if left is not None and nbytes > left.nbytes:
        raise MemoryError(f"L2 of {human(nbytes)} does not fit: {left}; lower hicache_size or hicache_ratio")
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except OSError as error:
        raise MemoryError(f"L2 of {human(nbytes)} cannot be allocated: {error}") from error


def pin(buffer: Buffer) -> None:
    """Register memory with CUDA, so that copies run beside the kernels. Raises MemoryError."""
    status = torch.cuda.cudart().cudaHostRegister(buffer.address, buffer.nbytes, 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        advice = memlock_shortage(buffer.nbytes) or "lower hicache_size or hicache_ratio"
        raise MemoryError(
            f"L2 of {human(buffer.nbytes)} cannot be pinned (cudaHostRegister: error {int(status)}); {advice}"
        )


def unpin(buffer: Buffer) -> None:
    """Take back ``pin``."""
    torch.cuda.cudart().cudaHostUnregister(buffer.address)  # type: ignore[no-untyped-call]


def _allocate_huge(nbytes: int, size: int, flags: int) -> mmap.mmap:
    count = -(-nbytes // size)
    try:
        flags |= _MAP_HUGETLB | (size.bit_length() - 1) << _MAP_HUGE_SHIFT
        return mmap.mmap(-1, count * size, flags=flags)
    except OSError as error:
        raise MemoryError(_huge_page_shortage(nbytes, count, size)) from error


def _huge_page_shortage(nbytes: int, count: int, size: int) -> str:
    pool = _SYSTEM / f"hugepages-{size >> 10}kB"
    need = f"L2 of {human(nbytes)} needs {count} huge pages of {size >> 20} MiB"
    try:
        total, free = (int((pool / name).read_text()) for name in ("nr_hugepages", "free_hugepages"))
    except OSError:
        return f"{need}, and this kernel has none of that size: {pool} is not there"
    # /proc/sys speaks of the kernel's default size alone
    control = "/proc/sys/vm/nr_hugepages" if size == _default_size() else str(pool / "nr_hugepages")
    return f"{need}, and {free} of {total} are free: write {total + count - free} or more to {control}"


def _default_size() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Hugepagesize:"):
            return int(line.split()[1]) << 10
    return 0
