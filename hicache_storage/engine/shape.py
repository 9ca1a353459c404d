"""The geometry of one token's KV, which decides how many bytes a page has and whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hicache_storage.engine.layouts import find_layout
from hicache_storage.errors import SettingsError
from hicache_storage.namespace import Namespace

DTYPE_NBYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""KV dtypes and the bytes of one element."""

_FORMS = "mha:LAYERSxHEADSxHEAD_DIM:DTYPE (mha:2x2x8:bf16) or mla:LAYERSxLATENT_DIM:DTYPE (mla:2x64:bf16)"


@dataclass(frozen=True, slots=True)
class KVShape:
    """KV of one token on one rank: ``kv`` x ``layers`` x ``heads`` x ``head_dim`` elements.

    MHA (and GQA) keeps keys and values apart, so ``kv`` is 2. MLA keeps one latent vector a layer:
    ``kv`` and ``heads`` are 1 and ``head_dim`` is the latent dimension, rope part included.
    """

    attention: str
    layers: int
    heads: int
    head_dim: int
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        if self.attention not in ("mha", "mla"):
            raise SettingsError(f"attention {self.attention!r} is none of: mha, mla")
        if self.dtype not in DTYPE_NBYTES:
            raise SettingsError(f"KV dtype {self.dtype!r} is none of: {', '.join(DTYPE_NBYTES)}")
        if min(self.layers, self.heads, self.head_dim) < 1:
            raise SettingsError(f"a KV shape has at least one layer, head and dimension, not {self}")

    @classmethod
    def mha(cls, layers: int, heads: int, head_dim: int, dtype: str = "bf16") -> KVShape:
        """Multi-head or grouped-query attention; ``heads`` are this rank's KV heads."""
        return cls("mha", layers, heads, head_dim, dtype)

    @classmethod
    def mla(cls, layers: int, latent_dim: int, dtype: str = "bf16") -> KVShape:
        """Multi-head latent attention: the same bytes on every tensor-parallel rank."""
        return cls("mla", layers, 1, latent_dim, dtype)

    @classmethod
    def parse(cls, text: str) -> KVShape:
        """The shape that ``mha:2x2x8:bf16`` or ``mla:2x64:bf16`` spells.

        Raises SettingsError that says which part is wrong.
        """
        parts = text.split(":")
        attention = parts[0]
        axes = {"mha": 3, "mla": 2}.get(attention)
        if axes is None or len(parts) != 3:
            raise SettingsError(f"KV shape {text!r} is not of the form {_FORMS}")
        sizes = parts[1].split("x")
        if len(sizes) != axes or not all(size.isascii() and size.isdigit() for size in sizes):
            raise SettingsError(f"KV shape {text!r}: {attention} has {axes} sizes joined by 'x': {_FORMS}")
        layers, *heads, dim = (int(size) for size in sizes)
        return cls(attention, layers, heads[0] if heads else 1, dim, parts[2])

    def __str__(self) -> str:
        sizes = (
            (self.layers, self.heads, self.head_dim)
            if self.attention == "mha"
            else (self.layers, self.head_dim)
        )
        return f"{self.attention}:{'x'.join(map(str, sizes))}:{self.dtype}"

    @property
    def kv(self) -> int:
        """2 where keys and values are kept apart (MHA), 1 where one vector is both (MLA)."""
        return 2 if self.attention == "mha" else 1

    @property
    def head_nbytes(self) -> int:
        """Bytes of one head of one token in one layer: the innermost run of every layout."""
        return self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token over all layers."""
        return self.kv * self.layers * self.heads * self.head_nbytes

    def page_nbytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens: the size of its object in L3."""
        return page_size * self.token_nbytes

    def namespace(self, page_size: int, mem_layout: str, **identity: Any) -> Namespace:
        """The identity of pages of this shape; ``identity`` adds fields such as ``model=``.

        Memory layouts that store the same bytes get the same identity and share pages. Raises
        SettingsError for a layout that this shape cannot have.
        """
        is_mha = self.attention == "mha"
        return Namespace(
            attention=self.attention,
            dtype=self.dtype,
            object_layout=find_layout(mem_layout, self.attention).object_layout,
            page_size=page_size,
            layers=(0, self.layers),
            heads=self.heads,
            head_dim=self.head_dim,
            v_head_dim=self.head_dim if is_mha else 0,
            **identity,
        )
