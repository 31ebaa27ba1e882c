"""What a user of transformers runs instead of handles: ``generate``, on text or behind copied caches.

Both use the engine's own weights through the model's own modules and attention. All prompts are equally long, so a padded
batch pads nothing: its best case.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from aaflow_langgraph.bench.sides import Outcome, Task
from aaflow_langgraph.engine.cache_adapter import cache_keyword
from aaflow_langgraph.engine.transformers import TransformersEngine


@dataclass(frozen=True, slots=True)
class SharedCache:
    """The context in a stock cache, and what it took."""

    cache: DynamicCache
    cpu_s: float
    wall_s: float


def shared_cache(engine: TransformersEngine, task: Task) -> SharedCache:
    """Prefill the context by the stock modules."""
    started, cpu = time.perf_counter(), time.process_time()
    cache = DynamicCache(config=engine.model.config)
    options: dict[str, Any] = {"logits_to_keep": 1} if engine.keeps_logits else {}
    with engine.stock_attention(), torch.inference_mode():
        engine.model(
            torch.tensor([task.context_ids]), use_cache=True, **{cache_keyword(engine.model): cache}, **options
        )
    return SharedCache(cache, time.process_time() - cpu, time.perf_counter() - started)


class Text:
    """``generate`` on the whole context: one prompt after another, or in one batch.

    With ``shared``, on deep copies of its cache instead: one per agent, or one that is repeated along the batch.

    Args:
        most: Agents of one run; the next ones the next time. What all of them take follows from it, as they wait in line.
    """

    def __init__(
        self, engine: TransformersEngine, task: Task, *, batched: bool, most: int, shared: DynamicCache | None = None
    ) -> None:
        self.name = ("text" if shared is None else "deepcopy") + ("-batched" if batched else "-serial")
        self.is_serial = not batched
        self.note = "prompts are equally long: nothing is padded" if batched else "agents wait in line"
        self.computed: tuple[str, ...] = ("kv_bytes",)
        self._engine = engine
        self._task = task
        self._most = most
        self._shared = shared
        self._next = 0
        self._first: dict[int, torch.Tensor] = {}

    def run(self, num_agents: int) -> Outcome:
        """See ``Side.run``."""
        count = min(num_agents, self._most)
        numbers = tuple((self._next + number) % num_agents for number in range(count))
        self._next += count
        batches = [(number,) for number in numbers] if self.is_serial else [numbers]
        token_ids: list[tuple[int, ...]] = []
        first_at: list[float] = []
        own_s = 0.0
        with self._engine.stock_attention(), torch.inference_mode():
            started, cpu = time.perf_counter(), time.process_time()
            for batch in batches:
                first, began = _FirstToken(), time.perf_counter()
                token_ids += self._generate(batch, first)
                first_at += [first.at - started] * len(batch)
                own_s += (first.at - began) / len(batches)
            total_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
        return Outcome(tuple(token_ids), tuple(first_at), total_s, cpu_s, own_s, numbers)

    def kv_bytes(self, num_agents: int) -> int:
        """Conversations held at once, and the shared cache where there is one."""
        layout, held = self._engine.layout, 1 if self.is_serial else num_agents
        num_context = len(self._task.context_ids)
        own = layout.num_bytes(num_context + self._task.new + self._task.output)
        return held * own + (0 if self._shared is None else layout.num_bytes(num_context))

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        """Of the last run that had this agent: what its first token was chosen from."""
        logits = self._first.get(number)
        return None if logits is None else logits.float().log_softmax(-1)

    def close(self) -> None:
        """Nothing is held between runs."""

    def _generate(self, numbers: Sequence[int], first: _FirstToken) -> list[tuple[int, ...]]:
        ids = torch.tensor([[*self._task.context_ids, *self._task.question_ids[number]] for number in numbers])
        options: dict[str, Any] = {}
        if self._shared is not None:
            cache = copy.deepcopy(self._shared)
            if len(numbers) > 1:
                cache.batch_repeat_interleave(len(numbers))
            options[cache_keyword(self._engine.model)] = cache
        chosen_from = _FirstLogits()
        # No explicit type: generate is typed for one of its many results.
        generate: Any = self._engine.model.generate
        out = generate(
            ids, attention_mask=torch.ones_like(ids), streamer=first, logits_processor=[chosen_from], **options
        )
        if chosen_from.logits is not None:
            self._first.update(zip(numbers, chosen_from.logits, strict=True))
        return [tuple(row) for row in out[:, ids.shape[1] :].tolist()]


class _FirstLogits(LogitsProcessor):
    """Keeps what the first tokens are chosen from, ``[batch, vocab]``; changes nothing."""

    def __init__(self) -> None:
        self.logits: torch.Tensor | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if self.logits is None:
            self.logits = scores.clone()
        return scores


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
