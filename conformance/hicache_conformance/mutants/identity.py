"""Identities with a hole: one field of the namespace does not tell pages apart."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar

from hicache_conformance.directory import DirectoryStorage
from hicache_conformance.mutants import mutant
from hicache_storage import Namespace


class _OwnIdentity(DirectoryStorage):
    """Makes its own directory name of the namespace, and takes only the page name of the key."""

    def identity(self) -> Namespace:
        raise NotImplementedError

    def path(self, key: str) -> Path:
        return self.root / self.identity().digest / key.rpartition("/")[2]


class _Ignoring(_OwnIdentity):
    """Leaves one field out."""

    ignored: ClassVar[str]

    def identity(self) -> Namespace:
        return replace(self.namespace, **{self.ignored: getattr(Namespace(), self.ignored)})


ALSO = {
    "ranks": (
        "identity.ranks_are_disjoint",
        "ranks.simulated_ranks_agree",
        "ranks.simulator_finds_the_known_divergences",
        "ranks.two_processes_agree",
        "ranks.four_processes_agree",
    ),
    "epoch": ("identity.epoch_bump_forgets",),
}


def _make(ignored: str) -> type[Any]:
    name = f"{ignored.title().replace('_', '')}MissingFromTheKey"
    doc = f"Keys do not depend on the namespace's {ignored}."
    made = type(name, (_Ignoring,), {"__doc__": doc, "__module__": __name__, "ignored": ignored})
    return mutant(f"identity.field_{ignored}", *ALSO.get(ignored, ()))(made)


# by name, since a target names its class as module:Class
globals().update({made.__name__: made for made in (_make(field.name) for field in fields(Namespace))})


@mutant("identity.near_collision_models")
class FlattensModelNames(_OwnIdentity):
    """Slashes of the model name become dashes: m/x is m-x (SGLang 0.5.23, survey A7)."""

    def identity(self) -> Namespace:
        return replace(self.namespace, model=self.namespace.model.replace("/", "-"))
