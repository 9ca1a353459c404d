"""What is said once at start-up: what was asked of SGLang, and what is in force.

SGLang rewrites combinations of layout, io backend and storage with a line in the log that nobody
reads; a dynamic backend without ``interface_v1`` silently takes the copying path. Each line that
costs the operator something says what to change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from hicache_storage.sglang.pool_pages import PoolPages
from hicache_storage.sglang.server import in_force, server_args
from hicache_storage.storage import HiCacheStorage

ZERO_COPY_LAYOUTS = ("page_first", "page_first_direct", "page_head")


def startup_report(
    backend: str, storage: HiCacheStorage, kv: PoolPages | None, interface_v1: bool
) -> Iterator[tuple[int, str]]:
    """The lines to log, each with its level; what costs the operator something is a warning."""
    yield logging.INFO, f"backend {backend}, namespace {storage.namespace}"
    if kv is not None:
        yield _effective("layout", "hicache_mem_layout", kv.layout)
        yield logging.INFO, f"L2 pages: {kv}"
        io_backend = in_force("hicache_io_backend")
        if io_backend is not None:
            yield _effective("io backend", "hicache_io_backend", io_backend)
        yield from _copies(storage, kv, interface_v1)
    for name, fact in storage.describe().items():
        yield logging.INFO, f"{name}: {fact}"


def _copies(storage: HiCacheStorage, kv: PoolPages, interface_v1: bool) -> Iterator[tuple[int, str]]:
    if not interface_v1:
        yield (
            logging.WARNING,
            (
                "NOT zero copy: SGLang copies every page once more each way; "
                'add "interface_v1": 1 to --hicache-storage-backend-extra-config'
            ),
        )
    elif kv.map is None:
        yield (
            logging.WARNING,
            ("NOT zero copy: this host pool gives no addresses; use --hicache-mem-layout page_first"),
        )
    elif storage.capabilities.zero_copy:
        yield logging.INFO, "zero copy: pages move straight between the store and L2"
    else:
        yield logging.INFO, "the backend copies pages once on their way to and from L2"
    if interface_v1 and kv.map is not None and kv.layout not in ZERO_COPY_LAYOUTS:
        yield (
            logging.WARNING,
            (
                f"layout {kv.layout} cuts a page into {len(kv.map.pieces)} pieces; "
                "--hicache-mem-layout page_first or page_first_direct into two at most"
            ),
        )


def _effective(what: str, flag: str, value: str) -> tuple[int, str]:
    asked = getattr(server_args(), flag, None)
    if asked in (None, value):
        return logging.INFO, f"{what} {value}"
    return logging.WARNING, f"{what} {value} is in force; {asked} was asked for and SGLang rewrote it"
