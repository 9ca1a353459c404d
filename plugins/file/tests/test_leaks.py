"""Nothing is left of a closed storage."""

import gc
import os
import threading
from pathlib import Path

from hicache_storage_file import FileSettings, FileStorage


def resident_kib():
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))


def test_a_hundred_openings_leave_no_thread_no_descriptor_and_no_memory(root, namespace, memory):
    page, back = memory.filled("page", 4096, 4096), memory.page(4096, 4096)
    key = namespace.key("page")

    def cycle():
        with FileStorage(FileSettings(root=root, min_free=0, threads=4), namespace) as storage:
            assert all(storage.batch_set_from([key], [page]))
            assert all(storage.batch_get_into([key], [back]))
            assert storage.get(key) is not None

    for _ in range(20):
        cycle()
    gc.collect()
    threads, descriptors, memory_kib = (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        resident_kib(),
    )
    for _ in range(100):
        cycle()
    gc.collect()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert resident_kib() - memory_kib < 2048
    assert list((root / ".hicache" / "tmp").iterdir()) == []
