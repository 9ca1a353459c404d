"""What stands in the way of much memory: the host's own, the cgroup's, and that of locked pages."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PROC = Path("/proc")


@dataclass(frozen=True, slots=True, order=True)
class Headroom:
    """How many more bytes can be had, and whose limit that is."""

    nbytes: int
    limit: str

    def __str__(self) -> str:
        return f"{human(self.nbytes)} are left ({self.limit})"


def headroom(proc: Path = PROC) -> Headroom | None:
    """The least that any limit leaves, without swapping; None where the system does not say."""
    return min([*_host(proc), *_cgroups(proc)], default=None)


def memlock_shortage(nbytes: int) -> str:
    """What to do where the limit of locked memory is below ``nbytes``; empty where it is not.

    Whoever locks pages under it (RDMA registration, io_uring's fixed buffers) fails.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY or limit >= nbytes:
        return ""
    return (
        f"RLIMIT_MEMLOCK is {human(limit)} and L2 has {human(nbytes)}: raise it by ulimit -l unlimited, "
        "LimitMEMLOCK=infinity in a systemd unit, or docker run --ulimit memlock=-1"
    )


def human(nbytes: int) -> str:
    """Bytes as GB, or as MB where there are few."""
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:.2f} MB"


def _host(proc: Path) -> Iterator[Headroom]:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            yield Headroom(int(line.split()[1]) * 1024, "MemAvailable of the host")


def _cgroups(proc: Path) -> Iterator[Headroom]:
    """Of every cgroup with a limit that this process is in, its ancestors included."""
    for directory in _cgroup_directories(proc):
        for limit, usage, caches in (
            ("memory.max", "memory.current", ("active_file", "inactive_file")),
            ("memory.high", "memory.current", ("active_file", "inactive_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")),
        ):
            allowed, used = _number(directory / limit), _number(directory / usage)
            if allowed is None or used is None:
                continue
            stat = dict(line.split() for line in _lines(directory / "memory.stat"))
            reclaimable = sum(int(stat.get(name, 0)) for name in caches)
            left = max(0, allowed - max(0, used - reclaimable))
            yield Headroom(left, f"cgroup limit {directory / limit}")


def _cgroup_directories(proc: Path) -> Iterator[Path]:
    """Where the limits of this process's memory are: cgroup v1's memory hierarchy, and v2's."""
    paths = {}
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            paths["cgroup2"] = path
        elif "memory" in controllers.split(","):
            paths["cgroup"] = path
    for line in _lines(proc / "self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        kind, _, options = file_system.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, point = (PurePosixPath(part) for part in mount.split()[3:5])
        own = PurePosixPath(paths[kind])
        # in a container the mount shows the process's own part of the tree as its root
        inside = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield Path(point / part)


def _number(path: Path) -> int | None:
    """None where there is no such file, or it says ``max``."""
    text = "".join(_lines(path))
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
