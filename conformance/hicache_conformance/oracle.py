"""What the bytes of a page are: a function of its name alone.

Any page found anywhere, in any process, can be checked without keeping a copy of it.
"""

from __future__ import annotations

import random


def page_content(name: str, nbytes: int) -> bytes:
    """The ``nbytes`` bytes of the page called ``name``; a prefix tells nothing of another page."""
    return random.Random(f"{name}/{nbytes}").randbytes(nbytes)
