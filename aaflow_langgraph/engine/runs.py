"""One request in an engine, by read path: a fixed past, a growing tail, a forward at a time.

*fast*: pieces are read where they lie. *universal*: one contiguous copy of the whole past for the model's own attention. See
``base.Run`` for the contract.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from aaflow_langgraph.engine import cache_adapter
from aaflow_langgraph.engine.attention import Past
from aaflow_langgraph.engine.base import Piece, Tail, chunk_spans
from aaflow_langgraph.engine.batch import Step

if TYPE_CHECKING:
    from aaflow_langgraph.engine.transformers import TransformersEngine


class Run:
    """Shared part of both read paths."""

    def __init__(self, engine: TransformersEngine, tail: Tail, priority: int) -> None:
        self._engine = engine
        self._tail = tail
        self._priority = priority
        self.position = tail.start + tail.length
        self.was_shared = False

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        """See ``base.Run.prefill``."""
        logits: torch.Tensor | None = None
        start = self.position
        for a, b in chunk_spans(start, start + len(token_ids)):
            logits = self._step(token_ids[a - start : b - start])
        if logits is None:
            raise ValueError("prefill needs at least one token")
        return logits

    def decode(self, token_id: int) -> torch.Tensor:
        """See ``base.Run.decode``."""
        return self._step((token_id,))

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        raise TypeError("a run is either fast or universal")


class FastRun(Run):
    """Reads pieces where they lie."""

    def __init__(
        self, engine: TransformersEngine, past: Sequence[Piece], tail: Tail, grid: int | None, priority: int
    ) -> None:
        super().__init__(engine, tail, priority)
        self._past = Past(past, tail, grid)
        # No cycle: what is read in place must be let go with the run, not with the next collection.
        me = weakref.proxy(self)
        self._cache = cache_adapter.as_cache(
            [
                cache_adapter.FastLayer(layer, self._past.write, lambda: me.position)
                for layer in range(engine.layout.num_layers)
            ]
        )

    def next_step(self, token_ids: Sequence[int]) -> Step:
        """These tokens behind what was run; not run yet."""
        return Step(token_ids, self.position, self._past, self._cache)

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        engine, step = self._engine, self.next_step(token_ids)
        # One forward at a time per engine: two that share the cores are slower than two in turn, and one for both is faster.
        if engine.batches and self._past.grid is None:
            logits = engine.batcher.step(step, self._priority)
            self.was_shared = step.num_together > 1
        else:
            logits = engine.batcher.alone(partial(engine.forward_step, step), self._priority)
        self._tail.length += len(token_ids)
        self.position += len(token_ids)
        return logits


class UniversalRun(Run):
    """Keeps one contiguous copy of the whole past beside the tail and hands it to the model's own attention."""

    def __init__(self, engine: TransformersEngine, past: Sequence[Piece], tail: Tail, priority: int) -> None:
        super().__init__(engine, tail, priority)
        self._num_new = 0
        self._all = torch.empty(
            engine.layout.shape(_roomy(self.position)), dtype=engine.model.dtype, device=engine.device
        )
        for piece in past:
            self._all[..., piece.start : piece.stop, :] = piece.kv
        if tail.length:
            self._all[..., tail.start : self.position, :] = tail.kv[..., : tail.length, :]
        me = weakref.proxy(self)
        self._cache = cache_adapter.as_cache(
            [
                cache_adapter.UniversalLayer(
                    layer, lambda *new: me._update(*new), lambda: me.position, is_sliding=sliding
                )
                for layer, sliding in enumerate(engine.sliding)
            ]
        )

    def _step(self, token_ids: Sequence[int]) -> torch.Tensor:
        self._num_new = len(token_ids)
        self._tail.ensure(self._tail.length + self._num_new)
        stop = self.position + self._num_new
        if stop > self._all.shape[3]:
            larger = self._all.new_empty(self._engine.layout.shape(_roomy(stop)))
            larger[..., : self.position, :] = self._all[..., : self.position, :]
            self._all = larger
        forward = partial(self._engine.forward, token_ids, self.position, self._cache)
        logits = self._engine.batcher.alone(forward, self._priority)
        self._tail.length += self._num_new
        self.position = stop
        return logits

    def _update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stop = self.position + self._num_new
        at = self._tail.length
        for which, new in enumerate((keys, values)):
            self._all[layer, which, :, self.position : stop] = new[0]
            self._tail.kv[layer, which, :, at : at + self._num_new] = new[0]
        return self._all[layer, 0, :, :stop][None], self._all[layer, 1, :, :stop][None]


def _roomy(num_tokens: int) -> int:
    """``num_tokens`` and room to grow, in whole blocks."""
    return (num_tokens // 256 + 2) * 256
