"""KV shapes: what they spell, how large they are, whose pages they make."""

import pytest

from hicache_storage import SettingsError
from hicache_storage.engine import KVShape


@pytest.mark.parametrize(
    "text", ["mha:2x2x8:bf16", "mha:32x8x128:fp8_e4m3", "mla:2x64:bf16", "mla:61x576:fp32"]
)
def test_a_shape_is_written_as_it_was_read(text):
    assert str(KVShape.parse(text)) == text


def test_the_size_of_a_page_is_the_product_of_its_axes():
    assert KVShape.parse("mha:3x5x7:fp32").page_nbytes(11) == 2 * 3 * 5 * 7 * 4 * 11
    assert KVShape.parse("mla:3x7:bf16").page_nbytes(11) == 3 * 7 * 2 * 11


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "not of the form"),
        ("gqa:2x2x8:bf16", "not of the form"),
        ("mha:2x2x8", "not of the form"),
        ("mha:2x8:bf16", "mha has 3 sizes"),
        ("mla:2x8x8:bf16", "mla has 2 sizes"),
        ("mha:2x-2x8:bf16", "mha has 3 sizes"),
        ("mha:2x0x8:bf16", "at least one"),
        ("mha:2x2x8:int3", "none of: bf16, fp16"),
    ],
)
def test_a_shape_that_is_wrong_says_why(text, complaint):
    with pytest.raises(SettingsError, match=complaint):
        KVShape.parse(text)


def test_layouts_share_pages_exactly_when_they_store_the_same_bytes():
    shape = KVShape.parse("mha:2x2x8:bf16")
    layer_first, direct, page_first, page_head = (
        shape.namespace(16, layout, model="m").digest
        for layout in ("layer_first", "page_first_direct", "page_first", "page_head")
    )
    assert layer_first == direct
    assert len({direct, page_first, page_head}) == 3


def test_a_layout_by_heads_is_refused_where_there_are_none():
    with pytest.raises(SettingsError, match="page_head orders a page by KV heads, which mla has not; choose"):
        KVShape.parse("mla:2x8:bf16").namespace(16, "page_head")


def test_every_axis_of_a_shape_is_part_of_the_identity():
    texts = ["mha:2x2x8:bf16", "mha:3x2x8:bf16", "mha:2x4x8:bf16", "mha:2x2x4:bf16", "mha:2x2x8:fp16"]
    texts += ["mla:2x8:bf16", "mla:2x16:bf16"]
    namespaces = [KVShape.parse(text).namespace(16, "page_first") for text in texts]
    namespaces.append(KVShape.parse(texts[0]).namespace(32, "page_first"))
    assert len({namespace.digest for namespace in namespaces}) == len(texts) + 1
