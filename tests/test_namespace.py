"""Two deployments share pages exactly when every field of their identity is equal."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage import InvalidKeyError, Namespace, SettingsError

BASE = Namespace(
    model="org/model",
    revision="abc",
    epoch=1,
    tenant="t",
    adapter="lora",
    attention="mha",
    dtype="bfloat16",
    object_layout="kv,token,layer,head,dim",
    page_size=64,
    layers=(0, 32),
    heads=8,
    head_dim=128,
    v_head_dim=128,
    ranks=(("tp", 0, 8),),
)
OTHER = {str: "other", int: 77}


@pytest.mark.parametrize("name", [f.name for f in dataclasses.fields(Namespace)])
def test_every_field_is_part_of_the_identity(name):
    value = getattr(BASE, name)
    changed = {"layers": (0, 33), "ranks": (("tp", 1, 8),)}.get(name) or OTHER[type(value)]
    assert dataclasses.replace(BASE, **{name: changed}).digest != BASE.digest


def test_near_collisions_differ():
    names = ["m/x", "m-x", "m_x", "M/X", "m/x ", ""]
    assert len({Namespace(model=name).digest for name in names}) == len(names)
    assert Namespace(model="ab", tenant="c").digest != Namespace(model="a", tenant="bc").digest


def test_the_digest_is_the_same_in_every_process_and_release():
    assert Namespace(model="m", page_size=64).digest == "b62979412f4300f2834c6bcf4b44dbc8"


def test_a_key_carries_the_digest_and_the_name():
    assert BASE.key("ab12.mamba") == f"{BASE.digest}/ab12.mamba"


HOSTILE = [
    "",
    ".",
    "..",
    "../x",
    "a/b",
    "a\\b",
    "a\0b",
    "ключ",
    "a b",
    "a\n",
    ".hidden",
    "x" * 10_000,
    "a%2f",
    "a:b",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_that_some_store_could_misread_is_refused(name):
    with pytest.raises(InvalidKeyError, match="page name"):
        BASE.key(name)


@given(st.text())
def test_no_name_escapes_its_namespace(name):
    try:
        key = BASE.key(name)
    except InvalidKeyError:
        return
    assert key.count("/") == 1
    assert key.isascii()
    assert not key.rpartition("/")[2].startswith(".")


def test_a_rank_outside_its_size_is_refused():
    with pytest.raises(SettingsError, match="tp rank 8 is not one of 8"):
        Namespace(ranks=(("tp", 8, 8),))


def test_people_see_what_was_given():
    assert "model=org/model" in str(BASE)
    assert "no identity" in str(Namespace())
