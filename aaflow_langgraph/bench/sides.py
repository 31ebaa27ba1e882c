"""What the sides of ``bench agents`` share: the task that all of them are given, what a run of one says, and the contract.

Greedy, a fixed number of tokens, no end of sequence, and prompts that are all equally long. Knows no way to run an agent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import GenerationConfig

from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ConfigError

_WORDS = """
river stone market letter winter garden signal bridge copper island morning record paper village engine harbour forest window
number summer station valley painter silver doctor kitchen border planet captain orange library field the of and in to was for
with from over under between after before near found made kept gave took sent wrote 1847
"""


@dataclass(frozen=True, slots=True)
class Task:
    """What every side is given: the same tokens. ``new`` and ``output`` are counts per agent."""

    context: str
    questions: tuple[str, ...]
    context_ids: tuple[int, ...]
    question_ids: tuple[tuple[int, ...], ...]
    new: int
    output: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of a side: the token ids of each agent, seconds from the side's start to each agent's first token.

    ``own_ttft_s`` is the mean time from an agent's (or a batch's) own start to its first token, where agents wait in line.
    ``numbers`` are those of the agents that were run; empty: the first ones.
    """

    token_ids: tuple[tuple[int, ...], ...]
    ttft_s: tuple[float, ...]
    total_s: float
    cpu_s: float
    own_ttft_s: float = 0.0
    numbers: tuple[int, ...] = ()

    @property
    def answers(self) -> dict[int, tuple[int, ...]]:
        """Token ids by agent."""
        return dict(zip(self.numbers or range(len(self.token_ids)), self.token_ids, strict=True))


class Side(Protocol):
    """One way to run N agents. ``computed`` names the columns that are not measured."""

    name: str
    is_serial: bool
    note: str
    computed: tuple[str, ...]

    def run(self, num_agents: int) -> Outcome:
        """Run the first ``num_agents`` questions, or some of them where all would take minutes.

        Raises:
            NotRun: Not here; says why.
        """

    def kv_bytes(self, num_agents: int) -> int:
        """Most bytes of keys and values held at once with this many agents."""

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        """Log-probabilities ``[vocab]``, fp32, of agent ``number``'s first token as this side computes them, outside of
        anything timed. None where it cannot say.
        """

    def close(self) -> None:
        """Give back what is held."""


class Streaming(Protocol):
    """A side that can be asked for one stream alone."""

    name: str

    def single_stream(self, num_tokens: int) -> float:
        """Tokens per second of one agent behind the warm context, decode only: from its first token to its last.

        Raises:
            NotRun: Not here; says why.
        """


class NotRun(Exception):
    """A side cannot run here; says why."""


def make_task(engine: TransformersEngine, context: int, num_agents: int, new: int, output: int) -> Task:
    """Texts of random words, fixed seeds, that encode to exactly ``context`` and ``new`` tokens."""
    frame = engine.frame
    text, ids = _exact(lambda t: frame.encode_text(t, what="the context", at_start=True), context, random.Random(0))
    asked = [
        _exact(lambda t: frame.encode_text(t, what="a question"), new, random.Random(number + 1))
        for number in range(num_agents)
    ]
    return Task(text, tuple(q for q, _ in asked), ids, tuple(i for _, i in asked), new, output)


def _exact(
    encode: Callable[[str], tuple[int, ...]], num_tokens: int, draw: random.Random
) -> tuple[str, tuple[int, ...]]:
    """A text of exactly ``num_tokens`` tokens: random words, cut where they are as many."""
    words = _WORDS.split()
    text = " ".join(draw.choice(words) for _ in range(num_tokens + 1))
    low, high = 1, len(text)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if len(encode(text[:middle])) < num_tokens else (low, middle)
    # A character more may be a token less; the count is found in the neighbourhood.
    for size in sorted(range(max(1, low - 40), low + 40), key=lambda size: abs(size - low)):
        ids = encode(text[:size])
        if len(ids) == num_tokens:
            return text[:size], ids
    raise ConfigError(f"this tokenizer encodes no beginning of a text of words to exactly {num_tokens} tokens")


@contextmanager
def without_end(engine: TransformersEngine, output: int) -> Iterator[None]:
    """Every side generates exactly ``output`` tokens: no end of turn, greedy. Put back at the end."""
    stop_ids, before = engine.stop_ids, engine.model.generation_config
    engine.stop_ids = frozenset()
    engine.model.generation_config = GenerationConfig(
        do_sample=False, max_new_tokens=output, eos_token_id=None, pad_token_id=0
    )
    try:
        yield
    finally:
        engine.stop_ids, engine.model.generation_config = stop_ids, before
