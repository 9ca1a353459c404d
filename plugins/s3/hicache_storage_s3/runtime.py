"""obstore, usable in a process that was forked from one that has used it.

Its requests are driven by threads of one runtime a process, which a fork does not copy: in a child,
every call waits for ever (seen with 0.12.1). A second copy of the extension module, loaded from
memory so that the dynamic linker takes it for another file, has a runtime of its own.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import threading
from types import ModuleType

import obstore

from hicache_storage.errors import UnavailableError

_lock = threading.Lock()
_modules: dict[int, ModuleType] = {}
"""The module that each process uses; a child inherits its parent's entry beside its own."""


def obstore_here() -> ModuleType:
    """The obstore package for this process. Raises UnavailableError when it cannot be loaded."""
    with _lock:
        found = _modules.get(os.getpid())
        if found is None:
            found = _modules[os.getpid()] = _second_copy() if _modules else obstore
        return found


def _second_copy() -> ModuleType:
    held = {name: sys.modules.pop(name) for name in _ours()}
    try:
        return _load(held["obstore._obstore"].__file__ or "")
    except (OSError, ImportError, AttributeError) as error:
        raise UnavailableError(f"obstore cannot be used after a fork here: {error}") from None
    finally:
        for name in _ours():
            del sys.modules[name]
        sys.modules.update(held)


def _ours() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "obstore"]


def _load(path: str) -> ModuleType:
    copy = os.memfd_create("obstore")
    try:
        with open(path, "rb") as extension:
            while os.sendfile(copy, extension.fileno(), None, 1 << 30):
                pass
        name, where = "obstore._obstore", f"/proc/self/fd/{copy}"
        loader = importlib.machinery.ExtensionFileLoader(name, where)
        spec = importlib.util.spec_from_file_location(name, where, loader=loader)
        assert spec is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    finally:
        os.close(copy)


def _after_fork() -> None:
    global _lock  # noqa: PLW0603 (another thread of the parent may have held it)
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
