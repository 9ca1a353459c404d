"""Checks a stored object by its own header, without knowing the page."""

from __future__ import annotations

import os

import xxhash

from hicache_storage.directory.direct import ALIGNMENT
from hicache_storage.directory.tree import Entry, Place, Tree
from hicache_storage.header import PLAIN_NBYTES, VERSION, header_nbytes, key_hash, unpack

_CHUNK_NBYTES = 1 << 20


def problem_with(tree: Tree, entry: Entry) -> str:
    """What is wrong with a stored object; empty when it is what was stored under its key.

    Raises OSError when it cannot be read.
    """
    directory = tree.shard(Place(entry.namespace, entry.shard, entry.name))
    if directory is None:
        raise FileNotFoundError(entry.name)
    handle = directory.open(entry.name, os.O_RDONLY)
    start = os.pread(handle.fd, ALIGNMENT, 0)
    nbytes = os.fstat(handle.fd).st_size
    header = unpack(start)
    if header is None:
        return "no header"
    if header.version != VERSION:
        return f"header version {header.version}"
    if header.nbytes + header.payload_nbytes != nbytes:
        return f"{nbytes} bytes instead of {header.nbytes + header.payload_nbytes}"
    if header.nbytes not in (PLAIN_NBYTES, header_nbytes(header.payload_nbytes, ALIGNMENT)):
        return f"header of {header.nbytes} bytes"
    if any(start[PLAIN_NBYTES : header.nbytes]):
        return "header padding is not zero"
    if header.namespace_digest != entry.namespace:
        return "stored in another namespace"
    if header.key_hash != key_hash(f"{entry.namespace}/{entry.name}"):
        return "stored under another name"
    state = xxhash.xxh3_64()
    offset = header.nbytes
    while chunk := os.pread(handle.fd, _CHUNK_NBYTES, offset):
        state.update(chunk)
        offset += len(chunk)
    return "" if state.intdigest() == header.checksum else "wrong checksum"
