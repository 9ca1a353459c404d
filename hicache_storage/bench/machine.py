"""On which machine, and with which versions, a figure was measured."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_PACKAGES = ("hicache-storage", "hicache-storage-file", "torch", "triton", "transformers")


def hardware(device: torch.device) -> dict[str, str]:
    """Processor, memory, kernel, and the GPU where figures are taken on one."""
    found = {
        "cpu": f"{_first('/proc/cpuinfo', 'model name') or platform.machine()}, {os.cpu_count()} cores",
        "memory": _first("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        found["driver"] = _first("/proc/driver/nvidia/version", "NVRM version")
    return found


def versions() -> dict[str, str]:
    """Of Python, CUDA and the packages that matter; those that are not installed are left out."""
    found = {"python": platform.python_version()}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def command() -> str:
    """How this process was called."""
    return " ".join(["hicache-storage", *sys.argv[1:]])


def _first(path: str, field: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")
