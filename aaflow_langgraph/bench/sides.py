"""What a user of transformers runs instead of handles: the sides of ``bench agents`` without a broker.

All of them use the engine's own weights through the model's own modules and attention, greedy, a fixed number of tokens and
no end of sequence. All prompts are equally long, so a padded batch pads nothing: its best case.
"""

from __future__ import annotations

import copy
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from aaflow_langgraph.engine.cache_adapter import cache_keyword
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

    ``own_ttft_s`` is the mean time from an agent's own start to its first token, where agents wait in line.
    """

    token_ids: tuple[tuple[int, ...], ...]
    ttft_s: tuple[float, ...]
    total_s: float
    cpu_s: float
    own_ttft_s: float = 0.0


class Side(Protocol):
    """One way to run N agents. ``computed`` names the columns that are not measured."""

    name: str
    is_serial: bool
    note: str
    computed: tuple[str, ...]

    def run(self, num_agents: int) -> Outcome:
        """Run the first ``num_agents`` questions."""

    def kv_bytes(self, num_agents: int) -> int:
        """Most bytes of keys and values held at once with this many agents."""

    def close(self) -> None:
        """Give back what is held."""


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


def shared_cache(engine: TransformersEngine, task: Task) -> tuple[DynamicCache, float]:
    """The context in a stock cache, and its CPU seconds."""
    started = time.process_time()
    cache = DynamicCache(config=engine.model.config)
    options: dict[str, Any] = {"logits_to_keep": 1} if engine.keeps_logits else {}
    with engine.stock_attention(), torch.inference_mode():
        engine.model(
            torch.tensor([task.context_ids]), use_cache=True, **{cache_keyword(engine.model): cache}, **options
        )
    return cache, time.process_time() - started


class Text:
    """``generate`` on the whole context: one prompt after another, or all in one batch.

    With ``shared``, on deep copies of its cache instead: one per agent, or one that is repeated along the batch.
    """

    def __init__(
        self, engine: TransformersEngine, task: Task, *, batched: bool, shared: DynamicCache | None = None
    ) -> None:
        self.name = ("text" if shared is None else "deepcopy") + ("-batched" if batched else "-serial")
        self.is_serial = not batched
        self.note = "prompts are equally long: nothing is padded" if batched else "agents wait in line"
        self.computed: tuple[str, ...] = ("kv_bytes",)
        self._engine = engine
        self._task = task
        self._shared = shared

    def run(self, num_agents: int) -> Outcome:
        """See ``Side.run``."""
        asked = [[*self._task.context_ids, *ids] for ids in self._task.question_ids[:num_agents]]
        batches = [[prompt] for prompt in asked] if self.is_serial else [asked]
        token_ids: list[tuple[int, ...]] = []
        first_at: list[float] = []
        own_s = 0.0
        with self._engine.stock_attention(), torch.inference_mode():
            started, cpu = time.perf_counter(), time.process_time()
            for prompts in batches:
                first, began = _FirstToken(), time.perf_counter()
                token_ids += self._generate(prompts, first)
                first_at += [first.at - started] * len(prompts)
                own_s += (first.at - began) / len(batches)
            total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        return Outcome(tuple(token_ids), tuple(first_at), total_s, cpu_s, own_s)

    def kv_bytes(self, num_agents: int) -> int:
        """Conversations held at once, and the shared cache where there is one."""
        layout, held = self._engine.layout, 1 if self.is_serial else num_agents
        num_context = len(self._task.context_ids)
        own = layout.num_bytes(num_context + self._task.new + self._task.output)
        return held * own + (0 if self._shared is None else layout.num_bytes(num_context))

    def close(self) -> None:
        """Nothing is held between runs."""

    def _generate(self, prompts: Sequence[list[int]], first: _FirstToken) -> list[tuple[int, ...]]:
        ids = torch.tensor(prompts)
        options: dict[str, Any] = {}
        if self._shared is not None:
            cache = copy.deepcopy(self._shared)
            if len(prompts) > 1:
                cache.batch_repeat_interleave(len(prompts))
            options[cache_keyword(self._engine.model)] = cache
        # No explicit type: generate is typed for one of its many results.
        generate: Any = self._engine.model.generate
        out = generate(ids, attention_mask=torch.ones_like(ids), streamer=first, **options)
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]


class _FirstToken(BaseStreamer):
    """Notes when the first new tokens are there; ``generate`` puts the prompts first."""

    def __init__(self) -> None:
        self.at = 0.0
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass
