"""A real model behind the engine: the proof that restored KV is the KV, by what comes out of it."""

import contextlib

import pytest
import torch

from hicache_storage import SettingsError, open_storage
from hicache_storage.engine import COPIED_BY, DecodeEngine, KVShape, Source, TierEngine
from hicache_storage.engine.model import ModelCompute, random_llama

PAGE = 16
VOCAB = 512
SHAPES = ["mha:3x2x8:fp32", "mha:3x2x16:bf16"]
COMBINATIONS = [(layout, io_backend) for layout, backends in COPIED_BY.items() for io_backend in backends]
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]
PROMPT = torch.randint(VOCAB, (6 * PAGE + 5,), generator=torch.Generator().manual_seed(7)).tolist()


class Deployment:
    """A model, and engines over one directory, each as fresh as after a restart."""

    def __init__(self, root, shape, device="cpu", layout="page_first", io_backend="kernel", **settings):
        self.shape = KVShape.parse(shape)
        self.model = random_llama(self.shape, device, seed=3, vocab=VOCAB)
        self._options = {"device": device, "mem_layout": layout, "io_backend": io_backend}
        self._settings = {"root": str(root), **settings}

    @contextlib.contextmanager
    def engine(self, chunk_tokens=PAGE):
        """An engine, and what runs the model in it."""
        compute = ModelCompute(self.model, self.shape, PAGE, chunk_tokens, keep_logits=PAGE)
        namespace = self.shape.namespace(PAGE, self._options["mem_layout"], model="random")
        with (
            open_storage("file", self._settings, namespace) as storage,
            TierEngine(
                self.shape,
                PAGE,
                l1_tokens=16 * PAGE,
                prefetch_policy="wait_complete",
                prefetch_threshold=PAGE,
                storage=storage,
                compute=compute,
                **self._options,
            ) as engine,
        ):
            yield engine, compute

    @contextlib.contextmanager
    def decode_engine(self):
        """An engine that decodes with the same model."""
        compute = ModelCompute(self.model, self.shape, PAGE)
        namespace = self.shape.namespace(PAGE, self._options["mem_layout"], model="random")
        with (
            open_storage("file", self._settings, namespace) as storage,
            DecodeEngine(
                self.shape, PAGE, l1_tokens=16 * PAGE, storage=storage, compute=compute, **self._options
            ) as engine,
        ):
            yield engine

    def from_scratch(self, tokens):
        """Logits of ``tokens``, none of which any tier has."""
        with self.engine() as (engine, compute):
            assert set(engine.prefill(tokens).sources) == {Source.RECOMPUTED}
            assert engine.wait_for_backup(30)
            return compute.logits.clone()


def flip_on_disk(root, kv):
    """Turn the sign of one number among the keys (0) or values (1) of some stored page."""
    page = next(root.glob("*/??/*"))
    data = bytearray(page.read_bytes())
    data[(kv - 2) * KVShape.parse(SHAPES[0]).page_nbytes(PAGE) // 2 + 3] ^= 0x80
    page.write_bytes(data)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("layout", "io_backend"), COMBINATIONS)
def test_logits_are_the_same_bits_from_every_tier_as_from_scratch(
    tmp_path, device, shape, layout, io_backend
):
    deployment = Deployment(tmp_path, shape, device, layout, io_backend)
    expected = deployment.from_scratch(PROMPT)
    with deployment.engine() as (engine, compute):
        for source in (Source.L3, Source.L1, Source.L2):
            if source is Source.L2:
                engine.flush_l1()
            compute.logits = None
            assert engine.prefill(PROMPT).sources == (source,) * 6
            assert torch.equal(compute.logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shared_prefix_from_storage_gives_another_prompt_the_logits_it_has_from_scratch(
    tmp_path, device, shape
):
    other = PROMPT[: 3 * PAGE] + PROMPT[: 2 * PAGE + 1]
    expected = Deployment(tmp_path / "other", shape, device).from_scratch(other)
    deployment = Deployment(tmp_path / "first", shape, device)
    deployment.from_scratch(PROMPT)
    with deployment.engine() as (engine, compute):
        report = engine.prefill(other)
        assert report.sources == (Source.L3,) * 3 + (Source.RECOMPUTED,) * 2
        assert torch.equal(compute.logits, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_prompt_that_is_cached_to_its_last_token_has_logits_too(tmp_path, device):
    deployment = Deployment(tmp_path, SHAPES[0], device)
    expected = deployment.from_scratch(PROMPT[: 4 * PAGE])
    with deployment.engine() as (engine, compute):
        assert engine.prefill(PROMPT[: 4 * PAGE]).sources == (Source.L3,) * 4
        assert torch.equal(compute.logits, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk_tokens", [PAGE, 4 * PAGE, 16 * PAGE])
def test_logits_are_those_of_the_model_without_any_engine(tmp_path, device, chunk_tokens):
    deployment = Deployment(tmp_path, SHAPES[0], device)
    with torch.inference_mode():
        plain = deployment.model(torch.tensor([PROMPT], device=device)).logits[0, -5:]
    with deployment.engine(chunk_tokens) as (engine, compute):
        for _ in range(2):
            engine.prefill(PROMPT)
            torch.testing.assert_close(compute.logits[-5:], plain, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv", [0, 1], ids=["a key", "a value"])
@pytest.mark.parametrize("tier", ["L2", "L3"])
def test_one_flipped_bit_in_restored_kv_changes_the_logits(tmp_path, device, tier, kv):
    deployment = Deployment(tmp_path, SHAPES[0], device, integrity=False)
    expected = deployment.from_scratch(PROMPT)
    with deployment.engine() as (engine, compute):
        if tier == "L2":
            engine.prefill(PROMPT)
            assert torch.equal(compute.logits, expected)
            engine.flush_l1()
            node = next(iter(engine._tiers.tree.nodes()))
            engine._tiers.l2.page(node.slots[1])[kv].view[3] ^= 0x80
        else:
            flip_on_disk(tmp_path, kv)
        report = engine.prefill(PROMPT)
        assert report.sources == (Source[tier],) * 6
        assert not torch.equal(compute.logits, expected)


def test_a_flipped_bit_on_disk_costs_a_page_and_not_the_answer(tmp_path):
    deployment = Deployment(tmp_path, SHAPES[0])
    expected = deployment.from_scratch(PROMPT)
    flip_on_disk(tmp_path, kv=1)
    with deployment.engine() as (engine, compute):
        report = engine.prefill(PROMPT)
        assert report.pages(Source.RECOMPUTED) >= 1
        assert torch.equal(compute.logits, expected)


def test_a_request_of_no_tokens_has_no_logits(tmp_path):
    with Deployment(tmp_path, SHAPES[0]).engine() as (engine, compute):
        engine.prefill([])
        assert compute.logits is None


def test_the_shape_of_llama_8b_gives_its_sizes():
    shape = KVShape.parse("mha:32x8x128:bf16")
    config = random_llama(shape, device="meta").config
    sizes = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.vocab_size)
    assert sizes == (4096, 14336, 32, 128256)


def test_a_shape_that_no_llama_has_is_refused():
    with pytest.raises(SettingsError, match=r"a Llama has mha KV in one of bf16, fp16, fp32, not mla:2x64"):
        random_llama(KVShape.parse("mla:2x64:bf16"))


def test_chunks_are_whole_pages():
    model = random_llama(KVShape.parse(SHAPES[0]), device="meta", vocab=8)
    with pytest.raises(SettingsError, match="a chunk of 24 tokens is no whole number of pages of 16"):
        ModelCompute(model, KVShape.parse(SHAPES[0]), 16, chunk_tokens=24)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_the_next_turn_are_the_same_bits_on_pages_that_a_decode_engine_generated(tmp_path, shape):
    answer = [token * 7 % VOCAB for token in range(3 * PAGE)]
    question = PROMPT[::-1][: PAGE + 3]
    expected = Deployment(tmp_path / "scratch", shape).from_scratch(PROMPT + answer + question)
    deployment = Deployment(tmp_path / "shared", shape)
    deployment.from_scratch(PROMPT)
    with deployment.decode_engine() as decode:
        request = decode.begin(PROMPT)
        for token in answer:
            decode.generate(request, token)
        assert decode.finish(request) == 0  # every page has gone by itself
        assert decode.wait_for_backup(30)
        assert decode.stats.backed_up == 3
    with deployment.engine() as (engine, compute):
        report = engine.prefill(PROMPT + answer + question)
        assert report.pages(Source.L3) == 9
        assert torch.equal(compute.logits, expected)
