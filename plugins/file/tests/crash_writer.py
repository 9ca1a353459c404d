"""Writes pages until it is killed: python crash_writer.py ROOT SEED COUNT

COUNT is the number of different pages. A line on stdout says that the store is open.
"""

import mmap
import random
import sys

from hicache_storage import Buffer, Namespace
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage_file import FileSettings, FileStorage

NAMESPACE = Namespace(model="crash")
NBYTES = 192 << 10


def content(name):
    return random.Random(name).randbytes(4096) * (NBYTES // 4096)


def main():
    root, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    choice = random.Random(seed)
    storage = IntegrityLayer(FileStorage(FileSettings(root=root, capacity="16MB", min_free=0), NAMESPACE))
    print("open", flush=True)
    memory = Buffer.of(mmap.mmap(-1, 8 * NBYTES))
    pages = [
        [memory.slice(i * NBYTES, NBYTES // 2), memory.slice(i * NBYTES + NBYTES // 2, NBYTES // 2)]
        for i in range(8)
    ]
    while True:
        names = [f"page-{choice.randrange(count)}" for _ in pages]
        for i, name in enumerate(names):
            memory.slice(i * NBYTES, NBYTES).view[:] = content(name)
        storage.batch_set_from([NAMESPACE.key(name) for name in names], pages)
        if choice.random() < 0.3:
            storage.delete([NAMESPACE.key(name) for name in names[:4]])


if __name__ == "__main__":
    main()
