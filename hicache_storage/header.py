"""The header in front of each stored object: what proves that the bytes are the page.

Sixty-four bytes, little-endian, padded with zeros to the header's size::

    magic 8s | version u16 | header size u16 | flags u32 | payload size u64
    | namespace digest 16s | key hash 16s | checksum u64

The checksum is XXH3-64 over the payload, read at several times memory speed and without the GIL
(xxhash). A reader that knows key and payload can compute the one header that may stand there, so
verifying is comparing: a flipped bit anywhere, padding included, is found.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

MAGIC = b"HICACHE\x00"
VERSION = 1
PLAIN_NBYTES = 64

_HEADER = struct.Struct("<8sHHIQ16s16sQ")
assert _HEADER.size == PLAIN_NBYTES


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header as found, whether or not they are true."""

    version: int
    nbytes: int
    payload_nbytes: int
    namespace_digest: str
    key_hash: bytes
    checksum: int


def header_nbytes(payload_nbytes: int, alignment: int) -> int:
    """Bytes of header in front of a payload: the alignment where that keeps the object aligned.

    It depends on the payload and the backend only, so every process that shares a store agrees.
    """
    if alignment > PLAIN_NBYTES and payload_nbytes % alignment == 0:
        return alignment
    return PLAIN_NBYTES


def checksum(pieces: Sequence[memoryview]) -> int:
    """XXH3-64 of the concatenated pieces."""
    if len(pieces) == 1:
        return int(xxhash.xxh3_64_intdigest(pieces[0]))
    state = xxhash.xxh3_64()
    for piece in pieces:
        state.update(piece)
    return int(state.intdigest())


def key_hash(key: str) -> bytes:
    """Sixteen bytes that stand for the whole object key."""
    return xxhash.xxh3_128_digest(key.encode())


def pack(key: str, payload: Sequence[memoryview], nbytes: int) -> bytes:
    """The one header of ``nbytes`` bytes that may stand in front of ``payload`` under ``key``.

    ``payload`` is the page's bytes in order, in one piece or several.
    """
    digest = key.partition("/")[0]
    fields = _HEADER.pack(
        MAGIC,
        VERSION,
        nbytes,
        0,
        sum(piece.nbytes for piece in payload),
        bytes.fromhex(digest) if len(digest) == 32 else xxhash.xxh3_128_digest(digest.encode()),
        key_hash(key),
        checksum(payload),
    )
    return fields.ljust(nbytes, b"\0")


def unpack(raw: bytes) -> Header | None:
    """The header's fields, or None when this is no header of ours."""
    if len(raw) < PLAIN_NBYTES:
        return None
    magic, version, nbytes, _, payload_nbytes, digest, keyed, total = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        return None
    return Header(version, nbytes, payload_nbytes, digest.hex(), keyed, total)
