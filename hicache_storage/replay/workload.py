"""A seeded request stream in the manner of chat traffic, for when there is no trace at hand.

Conversations begin with one of a few system prompts, some much more popular than others (Zipf). Each
turn sends the whole history again with the last answer and a new question. Mostly a recent
conversation goes on; now and then an old one does, or a user goes back some turns and asks again,
so that histories branch. Conversations that went quiet are forgotten by the users in the end.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TypeAlias

from hicache_storage.replay.request import Request

_Segments: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Workload:
    """The make-up of a stream; lengths are (least, most) tokens, shares are probabilities."""

    seed: int = 0
    requests: int = 2000
    system_prompts: int = 12
    system_tokens: tuple[int, int] = (256, 2048)
    question_tokens: tuple[int, int] = (16, 512)
    answer_tokens: tuple[int, int] = (32, 640)
    most_tokens: int = 8192
    """A history that would grow longer is not continued."""
    conversations: int = 256
    """Conversations that may still be continued."""
    new_share: float = 0.25
    branch_share: float = 0.15
    zipf: float = 1.1
    """Exponent of popularity, of system prompts by rank and of conversations by recency."""
    mean_gap_ms: float = 200.0

    def __iter__(self) -> Iterator[Request]:
        """The requests, in order of arrival; the same for the same fields."""
        rng = random.Random(self.seed)
        ids = count(self.seed << 32)
        prompts: list[_Segments] = [
            ((next(ids), rng.randint(*self.system_tokens)),) for _ in range(self.system_prompts)
        ]
        popularity = self._zipf_weights(self.system_prompts)
        recency = self._zipf_weights(self.conversations)
        histories: list[_Segments] = []  # the most recent one first
        clock = 0.0
        for _ in range(self.requests):
            clock += rng.expovariate(1 / self.mean_gap_ms)
            if not histories or rng.random() < self.new_share:
                history = rng.choices(prompts, cum_weights=popularity)[0]
            else:
                rank = rng.choices(range(len(histories)), cum_weights=recency[: len(histories)])[0]
                history = histories[rank]
                if rng.random() < self.branch_share:
                    # one segment is the system prompt, two more make a turn
                    history = history[: 1 + 2 * rng.randrange(len(history) // 2)]
                else:
                    del histories[rank]
            prompt = (*history, (next(ids), rng.randint(*self.question_tokens)))
            yield Request(int(clock), prompt)
            history = (*prompt, (next(ids), rng.randint(*self.answer_tokens)))
            if sum(tokens for _, tokens in history) + self.question_tokens[1] <= self.most_tokens:
                histories.insert(0, history)
                del histories[self.conversations :]

    def _zipf_weights(self, ranks: int) -> list[float]:
        return list(accumulate(1 / rank**self.zipf for rank in range(1, ranks + 1)))
