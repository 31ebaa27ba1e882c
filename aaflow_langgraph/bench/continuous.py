"""transformers' own continuous batching as a side of ``bench agents``.

``generate_batch`` shares whole blocks of a common prefix once they are in its cache; its manager is kept between calls.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import torch

from aaflow_langgraph.bench.sides import NotRun, Outcome, Task
from aaflow_langgraph.engine.transformers import TransformersEngine

_PAGE_TOKENS = 256


class Continuous:
    """``generate_batch`` with block sharing, its manager kept; the context is in its cache before anything is timed."""

    def __init__(self, engine: TransformersEngine, task: Task, most_agents: int) -> None:
        self.name = "hf-continuous"
        self.is_serial = False
        self.note = "generate_batch, warm: the context's whole blocks are in its cache; it hands out no distribution"
        self.computed: tuple[str, ...] = ("kv_bytes",)
        self._engine = engine
        self._task = task
        self._most_agents = most_agents
        self._config: Any = None
        self._generation: Any = None

    def run(self, num_agents: int) -> Outcome:
        """See ``Side.run``."""
        if self._config is None:
            self._warm()
        asked = [[*self._task.context_ids, *ids] for ids in self._task.question_ids[:num_agents]]
        started, cpu = time.perf_counter(), time.process_time()
        done = self._generate(asked)
        cpu_s = time.process_time() - cpu
        # To the last token: what it takes to stop and restart its thread is a matter of this call, not of serving.
        total_s = max(result.timestamps[-1] for result in done) - started
        # Results come in the order in which they are finished.
        by_prompt = {tuple(result.prompt_ids): result for result in done}
        ordered = [by_prompt[tuple(prompt)] for prompt in asked]
        token_ids = tuple(tuple(result.generated_tokens) for result in ordered)
        return Outcome(token_ids, tuple(result.timestamps[0] - started for result in ordered), total_s, cpu_s)

    def kv_bytes(self, num_agents: int) -> int:
        """Whole blocks: the context's once, the rest per agent."""
        num_context = len(self._task.context_ids)
        shared = num_context // _PAGE_TOKENS
        own = -(-(num_context + self._task.new + self._task.output) // _PAGE_TOKENS) - shared
        return self._engine.layout.num_bytes((shared + num_agents * own) * _PAGE_TOKENS)

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        """Nothing: its results have no distribution."""

    def close(self) -> None:
        """End its thread and give its cache back."""
        if self._config is not None:
            model: Any = self._engine.model
            model.destroy_cached_continuous_batching_manager()

    def _warm(self) -> None:
        try:
            from transformers import ContinuousBatchingConfig
        except ImportError as error:
            raise NotRun("this version of transformers has no ContinuousBatchingConfig") from error
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        num_context = len(self._task.context_ids)
        own = -(-(num_context + self._task.new + self._task.output) // _PAGE_TOKENS) + 1
        # It takes no None for "no end"; this id is never sampled.
        self._generation = copy.copy(self._engine.model.generation_config)
        self._generation.eos_token_id = self._engine.vocab_size
        self._config = ContinuousBatchingConfig(
            page_size=_PAGE_TOKENS,
            num_blocks=own * (self._most_agents + 1),
            max_batch_tokens=num_context + self._task.new * self._most_agents + _PAGE_TOKENS,
            allow_block_sharing=True,
        )
        self._generate([[*self._task.context_ids, *self._task.question_ids[0]]])

    def _generate(self, prompts: list[list[int]]) -> list[Any]:
        model: Any = self._engine.model
        try:
            with self._engine.stock_attention():
                done = model.generate_batch(
                    inputs=prompts,
                    generation_config=self._generation,
                    continuous_batching_config=self._config,
                    persistent_manager=True,
                    record_timestamps=True,
                    warmup=False,
                )
        except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ImportError) as error:
            raise NotRun(f"generate_batch: {type(error).__name__}: {str(error)[:200]}") from error
        if len(done) != len(prompts):
            raise NotRun(f"generate_batch finished {len(done)} of {len(prompts)} requests")
        return list(done.values())
