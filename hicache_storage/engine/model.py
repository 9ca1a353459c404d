"""A real model behind the engine: a randomly initialised Llama whose KV lives in the pages of L1.

Needs transformers (``[model]``); nothing is downloaded. What a page restores can be judged by what
comes out: with the tokens cut into the same chunks, logits are the same bits whether the pages
before a chunk were computed a moment ago or came from storage.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from hicache_storage.engine.compute import Work
from hicache_storage.engine.shape import KVShape
from hicache_storage.errors import SettingsError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

_QUERY_HEADS_PER_KV_HEAD = 4


def random_llama(shape: KVShape, device: str = "cpu", seed: int = 0, vocab: int = 128256) -> Any:
    """A Llama with the KV of ``shape``, which for 32x8x128 is Llama-3.1-8B in all its sizes.

    Raises SettingsError for a shape that Llama cannot have.
    """
    if shape.attention != "mha" or shape.dtype not in DTYPES:
        raise SettingsError(f"a Llama has mha KV in one of {', '.join(DTYPES)}, not {shape}")
    heads = shape.heads * _QUERY_HEADS_PER_KV_HEAD
    hidden = heads * shape.head_dim
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 2,
        initializer_range=hidden**-0.5,  # so that attention attends, at any size
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.head_dim,
        max_position_embeddings=131072,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[shape.dtype]).eval()


class ModelCompute:
    """Prefills a model's KV into L1, ``chunk_tokens`` at a time. A Compute.

    Chunks end at multiples of ``chunk_tokens``, so those that a restored prefix leaves to compute are
    those that a prefill from scratch ends with, when ``chunk_tokens`` is the page size: the same
    shapes, hence the same arithmetic. Of a request that is cached to its last token, the last page is
    computed again, as in SGLang: there are no logits without it.

    After each request ``logits`` are those of its last ``keep_logits`` tokens, or of as many as were
    in its last chunk, and ``ready_at`` is when they were computed (``time.perf_counter``).
    """

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        page_size: int,
        chunk_tokens: int | None = None,
        keep_logits: int = 1,
    ) -> None:
        self._model = model
        self._dtype = DTYPES[shape.dtype]
        self._layers = shape.layers
        self._page_size = page_size
        self._chunk_tokens = chunk_tokens or page_size
        self._keep_logits = keep_logits
        self.logits: torch.Tensor | None = None
        self.ready_at = 0.0
        if self._chunk_tokens % page_size:
            raise SettingsError(
                f"a chunk of {chunk_tokens} tokens is no whole number of pages of {page_size}"
            )

    @torch.inference_mode()
    def compute(self, pages: torch.Tensor, work: Work) -> None:
        """Run the model over what is not cached; its KV of full pages is in L1 then."""
        end = len(work.tokens)
        position = min(work.cached, max(0, end - 1) // self._page_size) * self._page_size
        self.logits = None
        tokens = torch.tensor(list(work.tokens[position:]), device=pages.device)
        kv = pages.view(self._dtype)
        slots = torch.tensor(list(work.slots), device=pages.device)
        start = position
        while position < end:
            step = min(end, (position // self._chunk_tokens + 1) * self._chunk_tokens)
            cache = Cache([PagedLayer(kv, layer, slots, work, position) for layer in range(self._layers)])
            output = self._model(
                tokens[None, position - start : step - start],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=self._keep_logits,
            )
            self.logits = output.logits[0]
            position = step
        if pages.is_cuda:
            torch.cuda.current_stream(pages.device).synchronize()
        self.ready_at = time.perf_counter()

    def check(self, pages: torch.Tensor, work: Work) -> int:
        """0: a model cannot tell a wrong byte from a right one. Logits can; see above."""
        del pages, work
        return 0


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's KV before and in the chunk that begins at token ``start``, kept in pages of L1.

    ``kv`` is L1 with the axes (page, kv, layer, token, head, dim).
    """

    def __init__(self, kv: torch.Tensor, layer: int, slots: torch.Tensor, work: Work, start: int) -> None:
        super().__init__()
        self._kv = kv[:, :, layer]
        self._layer = layer
        self._slots = slots
        self._work = work
        self._start = start
        self._page_size = kv.shape[3]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the chunk's KV into its pages; all KV up to the end of the chunk."""
        self._work.loading.wait_layer(self._layer)
        return self._extended(0, key_states), self._extended(1, value_states)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: L1 was there before."""

    def get_seq_length(self) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._start + query_length, 0

    def get_max_cache_shape(self) -> int:
        return -1

    get_max_length = get_max_cache_shape  # as newer versions of transformers call it

    def _extended(self, kv: int, states: torch.Tensor) -> torch.Tensor:
        """``states``, with axes (1, head, token, dim), after what is in the pages before them."""
        pages = self._kv[:, kv]
        before = self._start // self._page_size
        new = states[0].transpose(0, 1)
        full = new.shape[0] // self._page_size
        missing = max(0, self._work.cached - before)  # a cached page is computed again, never written
        if full > missing:
            pages.index_copy_(
                0,
                self._slots[before + missing : before + full],
                new[missing * self._page_size : full * self._page_size].reshape(-1, *pages.shape[1:]),
            )
        past = pages.index_select(0, self._slots[:before]).flatten(0, 1)
        return torch.cat([past, new]).transpose(0, 1)[None]
