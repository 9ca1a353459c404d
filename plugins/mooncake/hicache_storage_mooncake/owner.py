"""``python -m hicache_storage_mooncake.owner MASTER NBYTES [SSD_DIR]``: contribute memory, serve nothing.

For development; in production run Mooncake's own store service. It ends with its standard input, or
on SIGTERM, and unmounts its segment first.
"""

from __future__ import annotations

import os
import signal
import sys

from hicache_storage_mooncake import library
from hicache_storage_mooncake.segments import Segments


def main(master: str, nbytes: str, ssd_path: str = "") -> int:
    """Exit status: 0 when it ended as asked, 1 when Mooncake refused."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    store = library.load().MooncakeDistributedStore()
    options = {"enable_ssd_offload": True, "ssd_offload_path": ssd_path} if ssd_path else {}
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master, **options)
    if code != 0:
        print(f"refused: {code}", flush=True)
        return 1
    segments = Segments(store, "tcp")
    segments.mount(int(nbytes))
    print("mounted", flush=True)
    try:
        sys.stdin.read()
    finally:
        segments.unmount(int(nbytes))
        os._exit(0)  # the client's own end takes 1 s and does no more


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
