"""Ten thousand damaged objects: none is served, and the next set heals each."""

import random

import pytest

from hicache_storage import Namespace, Status
from hicache_storage.layers.integrity import IntegrityLayer
from hicache_storage_file import FileSettings, FileStorage

NAMESPACE = Namespace(model="corruption")
NBYTES = 4096
BATCH = 100
ROUNDS = 20  # of 100 damaged pages for each of five kinds


def truncate(path, other, chance):
    path.write_bytes(path.read_bytes()[: chance.randrange(NBYTES + 4096)])


def fill_with_zeros(path, other, chance):
    path.write_bytes(bytes(path.stat().st_size))


def flip_a_bit(path, other, chance):
    damaged = bytearray(path.read_bytes())
    damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    path.write_bytes(damaged)


def swap(path, other, chance):
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def put_a_foreign_object(path, other, chance):
    """A valid object of another namespace: another model's page under the same name."""
    foreign = path.parents[2] / Namespace(model="foreign").digest / path.parent.name / path.name
    path.write_bytes(foreign.read_bytes())


@pytest.mark.parametrize("damage", [truncate, fill_with_zeros, flip_a_bit, swap, put_a_foreign_object])
def test_a_damaged_page_is_a_miss_once_and_then_healed(root, tools, damage):
    seed = random.randrange(1 << 32)
    print("seed", seed)
    chance = random.Random(seed)
    memory = tools.Memory(2 * BATCH * NBYTES)
    names = [f"{damage.__name__}-{i}" for i in range(BATCH)]
    keys = [NAMESPACE.key(name) for name in names]
    pages = [memory.filled(name, NBYTES // 4, NBYTES - NBYTES // 4) for name in names]
    back = [memory.page(NBYTES // 4, NBYTES - NBYTES // 4) for _ in names]
    settings = FileSettings(root=root, min_free=0)
    with IntegrityLayer(FileStorage(settings, Namespace(model="foreign"))) as foreign:
        assert all(foreign.batch_set_from([Namespace(model="foreign").key(name) for name in names], pages))
    damaged = 0
    with IntegrityLayer(FileStorage(settings, NAMESPACE)) as storage:
        assert all(storage.batch_set_from(keys, pages))
        paths = {path.name: path for path in (root / NAMESPACE.digest).glob("??/*")}
        for _ in range(ROUNDS):
            order = chance.sample(names, BATCH)
            partners = dict(zip(order[::2], order[1::2], strict=True))
            for name, other in partners.items():
                damage(paths[name], paths[other], chance)
                if damage is not swap:
                    damage(paths[other], paths[name], chance)
            damaged += BATCH
            assert storage.batch_get_into(keys, back) == [Status.CORRUPT] * BATCH
            assert storage.batch_get_into(keys, back) == [Status.MISSING] * BATCH
            assert all(storage.batch_set_from(keys, pages))
            assert all(storage.batch_get_into(keys, back))
            assert [tools.bytes_of(page) for page in back] == [tools.bytes_of(page) for page in pages]
    assert damaged == 2000
