"""Memory that this process contributes to the store."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import Any

from hicache_storage import UnavailableError

logger = logging.getLogger(__name__)

GRACE_SECONDS = 1
"""A segment that is taken back gets no more pages at once, and is freed after this long: whoever is
at one of its pages finishes.
"""


@dataclass
class _Mounted:
    ids: list[str]
    users: int = 0


class Segments:
    """Segments of one client. Those who ask for the same size share one. Thread-safe.

    To mount and to unmount takes a few milliseconds; a segment given to ``setup`` goes only with its
    client, whose end takes 2 s and holds the GIL (0.3.13.post1).
    """

    def __init__(self, store: Any, protocol: str) -> None:
        self._store = store
        self._protocol = protocol
        self._lock = threading.Lock()
        self._mounted: dict[int, _Mounted] = {}
        self._left: list[str] = []

    def mount(self, nbytes: int) -> None:
        """Contribute a segment of this size, or share the one there is; 0 is none.

        Raises UnavailableError when Mooncake refuses.
        """
        if nbytes == 0:
            return
        with self._lock:
            mounted = self._mounted.get(nbytes)
            if mounted is None:
                if self._left and self._store.unmount_and_free_segment(self._left, 0) == 0:
                    self._left = []
                answer = self._store.allocate_and_mount_segment(nbytes, self._protocol, "*")
                mounted = _Mounted(list(answer.get("segment_ids", ())))
                if answer["ret"] != 0 or answer["allocated_size"] < nbytes:
                    self._store.unmount_and_free_segment(mounted.ids, 0)
                    raise UnavailableError(
                        f"Mooncake cannot contribute {nbytes} bytes of this machine's memory "
                        f"(code {answer['ret']}); its log on stderr says more"
                    )
                self._mounted[nbytes] = mounted
            mounted.users += 1

    def unmount(self, nbytes: int) -> None:
        """Take back one ``mount``. Where the master does not answer, the next ``mount`` comes back to it."""
        if nbytes == 0:
            return
        with self._lock:
            mounted = self._mounted[nbytes]
            mounted.users -= 1
            if mounted.users:
                return
            del self._mounted[nbytes]
            code = self._store.unmount_and_free_segment(mounted.ids, GRACE_SECONDS)
            if code != 0:
                self._left += mounted.ids
                logger.warning("a segment of %d bytes stays mounted (Mooncake's code %d)", nbytes, code)
