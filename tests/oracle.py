"""I14's oracle: the stock model on token ids, one whole forward per token, no cache, none of our code."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel


class Stock:
    """Greedy tokens and logits of a plain forward; what was asked before is remembered."""

    def __init__(self, model: PreTrainedModel, stop_ids: frozenset[int]) -> None:
        self._model = copy.deepcopy(model)
        self._model.set_attn_implementation("eager")
        self._stop_ids = stop_ids
        self._known: dict[tuple[int, ...], int] = {}

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits after the last of ``ids``, ``[vocab]``."""
        device = self._model.device
        with torch.inference_mode():
            return self._model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False).logits[0, -1]

    def greedy(self, ids: Sequence[int], count: int) -> tuple[int, ...]:
        """At most ``count`` new tokens, up to an end of turn."""
        out = list(ids)
        for _ in range(count):
            key = tuple(out)
            if key not in self._known:
                self._known[key] = int(self.logits(out).argmax())
            if self._known[key] in self._stop_ids:
                break
            out.append(self._known[key])
        return tuple(out[len(ids) :])


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def prose(count: int, seed: int = 0) -> str:
    """``count`` letters and spaces: one token each for the tiny tokenizer."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 27, (count - 1,), generator=generator).tolist() if count > 1 else []
    return "a" + "".join((ALPHABET + " ")[number] for number in drawn)


_stocks: dict[int, tuple[Any, Stock]] = {}


def stock_of(engine: Any) -> Stock:
    """The oracle of an engine's model, one per engine."""
    if id(engine) not in _stocks:
        _stocks[id(engine)] = (engine, Stock(engine.model, engine.stop_ids))
    return _stocks[id(engine)][1]
