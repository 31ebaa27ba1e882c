"""What KV handles are compared with: every node is given the whole conversation as text and prefills all of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine

Messages = Sequence[dict[str, str]]


@dataclass(frozen=True)
class Reply:
    """What one node produced and what it cost."""

    text: str
    token_ids: tuple[int, ...]
    num_context: int
    num_reused: int
    ttft_ms: float


class TextModel(Protocol):
    """Generates the next assistant turn of a conversation from nothing but its text. Keeps nothing between calls."""

    def __call__(self, messages: Messages, max_tokens: int) -> Reply: ...


class StockTransformers:
    """``apply_chat_template`` and ``generate`` of an unmodified model: the baseline of the timed leg.

    Nodes that run at once take turns, and waiting for a turn is not counted: three prefills on the same cores would each
    take three times as long, and the comparison would flatter the handles.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._turn = threading.Lock()

    def __call__(self, messages: Messages, max_tokens: int) -> Reply:
        with self._turn, torch.inference_mode():
            clock = _Clock()
            prompt = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ).to(self._model.device)
            ids: Any = self._model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False, streamer=clock)
        num_context = prompt["input_ids"].shape[1]
        new = [token_id for token_id in ids[0, num_context:].tolist() if token_id != self._tokenizer.eos_token_id]
        return Reply(self._tokenizer.decode(new, skip_special_tokens=True), tuple(new), num_context, 0, clock.ttft_ms)


class EmptyBroker:
    """A broker that is opened for one call and has nothing to reuse: the baseline of the equality leg.

    The arithmetic is the deterministic one of the run with handles; where the conversation comes from is not: it is
    rendered and encoded as a whole, as for any text.
    """

    def __init__(self, engine: TransformersEngine) -> None:
        self._engine = engine

    def __call__(self, messages: Messages, max_tokens: int) -> Reply:
        tokenizer = self._engine.tokenizer
        prompt = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if tokenizer.bos_token and tokenizer.encode("x")[0] == tokenizer.bos_token_id:
            prompt = prompt.removeprefix(tokenizer.bos_token)  # encoding the prompt puts it there
        num_tokens = len(tokenizer.encode(prompt)) + max_tokens
        with KVBroker.open(self._engine, pool_bytes=self._engine.layout.num_bytes(2 * num_tokens + 4096)) as broker:
            sampling = Sampling(max_tokens=max_tokens)
            generation = broker.generate(prompt, raw=True, sampling=sampling, deterministic=True)
        usage = generation.usage
        return Reply(generation.text, generation.token_ids, usage.num_context, usage.num_reused, usage.ttft_s * 1000)


class _Clock(BaseStreamer):
    """Notes when the first new token is there; ``generate`` puts the prompt first."""

    def __init__(self) -> None:
        self.ttft_ms = 0.0
        self._started = time.perf_counter()
        self._num_puts = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_puts += 1
        if self._num_puts == 2:
            self.ttft_ms = (time.perf_counter() - self._started) * 1000

    def end(self) -> None:
        pass
