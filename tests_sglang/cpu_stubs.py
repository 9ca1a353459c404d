"""What lets the real ``sglang`` wheel run its cache controllers on a machine without a GPU.

Three things, and nothing else, are replaced: packages that exist for a GPU only and are
imported but never run on this path, the host <-> device copy kernels, and pinned memory.
Everything a storage backend meets (controllers, radix trees, pools, threads) stays SGLang's.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any

from copy_kernels import KERNELS

GPU_ONLY_PACKAGES = frozenset(
    {"deep_gemm", "flashinfer", "sgl_kernel", "torchao", "torchvision", "triton", "xgrammar"}
)

POOL_MODULES = (
    "memory_pool_host",
    "pool_host.base",
    "pool_host.dsa",
    "pool_host.mamba",
    "pool_host.mha",
    "pool_host.mla",
    "pool_host.unified",
)


class _Placeholder(type):
    """A name from a GPU package: a class, so that it also works in isinstance, bases and
    annotations. Called with one function or class it returns it, which is what the
    decorators (``@triton.jit``) need."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and not kwargs and isinstance(args[0], types.FunctionType | type):
            return args[0]
        return cls

    def __getattr__(cls, name: str) -> _Placeholder:
        return _attribute(f"{cls.__module__}.{cls.__name__}", name)

    def __getitem__(cls, _: Any) -> _Placeholder:
        return cls


def _attribute(owner: str, name: str) -> _Placeholder:
    """``triton.runtime.driver`` must be absent: SGLang asks it for the platform and falls
    back to the CPU only when the question fails."""
    if name.startswith("__") or name == "driver":
        raise AttributeError(f"{owner} has no {name!r} on a CPU")
    schema = classmethod(lambda *_: {"type": "any"})
    body = {"__module__": owner, "__get_pydantic_core_schema__": schema}
    return _Placeholder(name, (), body)


class _PlaceholderModule(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        return _attribute(self.__name__, name)


class _GpuPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in GPU_ONLY_PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ == "sgl_kernel.kvcacheio":
            vars(module).update(KERNELS)


class _NeverPinned:
    """Pinning needs a CUDA driver; the pools then neither call ``cudaHostRegister`` nor ask
    torch for pinned tensors."""

    def __get__(self, pool: object, owner: type | None = None) -> bool:
        return False

    def __set__(self, pool: object, value: bool) -> None:
        pass


def install() -> None:
    """Prepare this process; call it before anything imports ``sglang``."""
    if any(isinstance(finder, _GpuPackages) for finder in sys.meta_path):
        return
    if "sglang" in sys.modules:
        raise RuntimeError("cpu_stubs.install() must come before the first sglang import")
    sys.meta_path.insert(0, _GpuPackages())
    _give_pools_their_kernels()
    from sglang.srt.mem_cache.memory_pool_host import HostKVCache

    HostKVCache.pin_memory = _NeverPinned()


def _give_pools_their_kernels() -> None:
    """Newer versions import the kernels only where CUDA is present, so the names are put
    into the pool modules; a version has the modules it has."""
    for name in POOL_MODULES:
        try:
            module = importlib.import_module(f"sglang.srt.mem_cache.{name}")
        except ModuleNotFoundError:
            continue
        vars(module).update(KERNELS)
