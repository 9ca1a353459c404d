"""The flags of the SGLang server that this process belongs to, where there is one."""

from __future__ import annotations

import importlib
from contextlib import suppress
from typing import Any


def server_args() -> Any:
    """The server's arguments, or None outside a server.

    As the operator gave them in 0.5.23; after SGLang has rewritten them in the versions before.
    """
    for module, accessor in (
        ("sglang.srt.runtime_context", "get_server_args"),
        ("sglang.srt.server_args", "get_global_server_args"),
    ):
        with suppress(Exception):  # not this version, or not inside a server
            return getattr(importlib.import_module(module), accessor)()
    return None


def in_force(flag: str) -> str | None:
    """The value of a HiCache flag after SGLang's rewriting, or None outside a server."""
    with suppress(ImportError):
        context = importlib.import_module("sglang.srt.runtime_context")
        with suppress(Exception):
            return str(getattr(context.get_memory(), flag))
        return None
    value = getattr(server_args(), flag, None)
    return None if value is None else str(value)
