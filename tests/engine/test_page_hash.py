"""The page-hash chain, against the way SGLang writes it down."""

import hashlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_storage.engine import page_hashes


def literal_hashes(tokens, page_size, parent=None):
    hashes = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        hasher = hashlib.sha256()
        if parent:
            hasher.update(bytes.fromhex(parent))
        for token in tokens[start : start + page_size]:
            hasher.update(token.to_bytes(4, byteorder="little", signed=False))
        parent = hasher.hexdigest()
        hashes.append(parent)
    return hashes


@given(st.lists(st.integers(0, 2**32 - 1), max_size=70), st.integers(1, 9))
def test_the_chain_is_sglangs(tokens, page_size):
    assert page_hashes(tokens, page_size) == literal_hashes(tokens, page_size)
    assert page_hashes(array("I", tokens), page_size) == literal_hashes(tokens, page_size)


@pytest.mark.parametrize("page_size", [511, 512, 513, 1024, 5000])
def test_large_pages_are_hashed_whole(page_size):
    tokens = [token * 7919 % 2**32 for token in range(2 * page_size + 3)]
    assert page_hashes(tokens, page_size) == literal_hashes(tokens, page_size)


def test_a_chain_goes_on_from_its_parent():
    tokens = list(range(40))
    whole = page_hashes(tokens, 8)
    assert page_hashes(tokens[16:], 8, parent=whole[1]) == whole[2:]


def test_a_page_that_is_not_full_has_no_hash():
    assert page_hashes(list(range(15)), 16) == []
    assert len(page_hashes(list(range(33)), 16)) == 2


@pytest.mark.parametrize("token", [-1, 2**32, "a", 1.5])
def test_a_token_that_is_no_unsigned_32_bit_number_is_refused(token):
    with pytest.raises(ValueError, match="token ids are integers"):
        page_hashes([0, token], 2)
