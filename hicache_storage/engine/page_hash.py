"""SGLang's page hashes: a chain over the pages of a token sequence.

The hash of a page is sha256 over its tokens as 4-byte little-endian unsigned integers, seeded with
the 32 digest bytes of the page before (``get_hash_str`` in ``mem_cache/hicache_storage.py``). It
names the whole prefix up to the page's last token.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

_STEP = 2047
"""hashlib lets go of the GIL for more bytes than this, and getting it back from busy I/O threads
takes far longer than hashing them."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as 4-byte little-endian unsigned integers; fastest for ``array('I')``.

    Raises ValueError for an id that is no unsigned 32-bit number.
    """
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        try:
            tokens = array("I", tokens)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids are integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        tokens = array("I", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def page_hashes(tokens: Sequence[int], page_size: int, parent: str | None = None) -> list[str]:
    """Hex hashes of the full pages of ``tokens``; a last page that is not full has none.

    ``parent`` is the hash of the page before the first token, None at the start of a sequence.
    """
    data = memoryview(token_bytes(tokens))
    step = 4 * page_size
    digest = b"" if parent is None else bytes.fromhex(parent)
    hashes = []
    for end in range(step, len(data) + 1, step):
        hasher = hashlib.sha256(digest)
        for start in range(end - step, end, _STEP):
            hasher.update(data[start : min(start + _STEP, end)])
        digest = hasher.digest()
        hashes.append(digest.hex())
    return hashes
