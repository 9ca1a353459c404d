"""Identity: whose pages these are, hashed into a digest that prefixes every key.

SGLang's page hashes name tokens only. The bytes behind a hash also depend on the model, its
weights, the dtype, the geometry and the rank; leaving any of those out serves one deployment's KV
to another (sglang issues 33268, 24758, 26670). Two deployments share pages exactly when every
field here is equal.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields

from hicache_storage.errors import InvalidKeyError, SettingsError

SCHEMA_VERSION = 1
MAX_NAME_LENGTH = 200

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")


def check_name(name: str) -> None:
    """Raise InvalidKeyError unless every backend can hold ``name`` as it stands.

    Names have 1 to 200 of the characters A-Z a-z 0-9 ``.`` ``_`` ``-`` and do not start with a
    dot: no separator, nothing that a file system, a URL or a shell would read as more than a name.
    """
    if name.isalnum() and name.isascii() and len(name) <= MAX_NAME_LENGTH:
        return  # a page hash: the way nearly all names take, five times faster than the pattern
    if _NAME.fullmatch(name) is None:
        raise InvalidKeyError(
            f"page name {name[:80]!r} must be made of letters, digits, '.', '_' and '-', a '.' not first"
        )
    if len(name) > MAX_NAME_LENGTH:
        raise InvalidKeyError(f"page name of {len(name)} characters is over the limit of {MAX_NAME_LENGTH}")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that decides the bytes of a page, besides its tokens.

    Leave a field at its default when it does not apply. Rank fields are set only where the bytes
    depend on the rank: an MLA page is the same on every TP rank and carries none.
    """

    model: str = ""
    revision: str = ""
    """Weights: a commit, a checksum; whatever changes when the weights do."""
    epoch: int = 0
    """Bump it to forget everything stored so far, at once (weights updated in place)."""
    tenant: str = ""
    """A salt that keeps tenants from sharing, or probing for, each other's pages."""
    adapter: str = ""
    """LoRA adapter, where it is not already mixed into the page hashes."""
    attention: str = ""
    """"mha" or "mla"."""
    dtype: str = ""
    object_layout: str = ""
    """Order of the axes in the stored bytes, such as "kv,layer,token,head,dim"."""
    page_size: int = 0
    """Tokens a page."""
    layers: tuple[int, int] = (0, 0)
    """First layer and one past the last (PP stages hold different ranges)."""
    heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    ranks: tuple[tuple[str, int, int], ...] = ()
    """(axis, rank, size) of each parallel axis that the bytes depend on, such as ("tp", 0, 8)."""
    schema: int = field(default=SCHEMA_VERSION)
    """Version of this record and of the object header."""

    def __post_init__(self) -> None:
        for axis, rank, size in self.ranks:
            if not 0 <= rank < size:
                raise SettingsError(f"{axis} rank {rank} is not one of {size} ranks")

    @property
    def digest(self) -> str:
        """32 hex characters that stand for all the fields."""
        return hashlib.blake2b(self.canonical().encode(), digest_size=16).hexdigest()

    def canonical(self) -> str:
        """The fields as JSON with sorted keys: what the digest is taken over."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def key(self, name: str) -> str:
        """The object key of the page called ``name`` (usually a page hash), in this namespace.

        Raises InvalidKeyError for a name that some backend could not hold, or could misread.
        """
        return self.keys([name])[0]

    def keys(self, names: Sequence[str]) -> list[str]:
        """The object keys of many pages; see ``key``."""
        for name in names:
            check_name(name)
        prefix = self.digest
        return [f"{prefix}/{name}" for name in names]

    def __str__(self) -> str:
        """The fields that are set, for people: logs, ``du``, ``doctor``."""
        named = ((f.name, getattr(self, f.name)) for f in fields(self) if f.name != "schema")
        default = Namespace()
        shown = [f"{name}={value}" for name, value in named if value != getattr(default, name)]
        return f"{self.digest[:12]} ({', '.join(shown) or 'no identity given'})"
