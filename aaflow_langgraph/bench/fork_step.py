"""What a decode step of forks costs beside what it must: the same batch on an empty cache, and one pass over the prefix.

Forks decode on threads of their own through the engine, as the requests of a graph do, so waiting for each other and handing
on are inside. The step is the median time between two tokens of a fork, over all forks; the bound is made of the same
forks on an empty cache, and of attention alone: one call per layer, the queries of all forks folded over the prefix, the median
of as many passes as there are steps.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from aaflow_langgraph.engine.attention import Past, flash
from aaflow_langgraph.engine.base import Piece, Tail
from aaflow_langgraph.engine.kernel import KernelPast
from aaflow_langgraph.engine.transformers import TransformersEngine

NUM_FORKS = 16
_NUM_TOKENS = 8


@dataclass(frozen=True, slots=True)
class ForkStep:
    """Medians over rounds; ``ratio`` is that of the rounds' step / (empty + attention), ``ratio_spread`` (max - min) / median."""

    forks: int
    step_s: float
    empty_s: float
    attention_s: float
    bound_s: float
    ratio: float
    ratio_spread: float


def measure(engine: TransformersEngine, past: torch.Tensor, tail: Callable[[int, int], Tail], rounds: int) -> ForkStep:
    """Forks behind ``past [L, 2, H, T, D]``, in turns with the same forks behind nothing and with attention alone.

    Args:
        tail: Makes one from its start and its room in tokens.
    """
    context = past.shape[3]
    pieces = [Piece(past, 0, context)]
    legs: tuple[list[float], list[float], list[float]] = ([], [], [])
    for number in range(rounds + 1):
        taken = (
            _step(engine, pieces, lambda: tail(context, _NUM_TOKENS + 1)),
            _step(engine, (), lambda: tail(0, _NUM_TOKENS + 1)),
            _attention(engine, past, tail(context, NUM_FORKS)),
        )
        if number:  # the first one warms up
            for leg, seconds in zip(legs, taken, strict=True):
                leg.append(seconds)
    ratios = [step / (empty + attention) for step, empty, attention in zip(*legs, strict=True)]
    step_s, empty_s, attention_s = (statistics.median(leg) for leg in legs)
    ratio = statistics.median(ratios)
    return ForkStep(
        NUM_FORKS,
        round(step_s, 5),
        round(empty_s, 5),
        round(attention_s, 5),
        round(empty_s + attention_s, 5),
        round(ratio, 3),
        round((max(ratios) - min(ratios)) / ratio, 3),
    )


def _step(engine: TransformersEngine, pieces: Sequence[Piece], tail: Callable[[], Tail]) -> float:
    runs = [engine.start(pieces, tail(), grid=None) for _ in range(NUM_FORKS)]
    together = threading.Barrier(NUM_FORKS)

    def decode(number: int) -> list[float]:
        together.wait()
        times = []
        for token in range(_NUM_TOKENS):
            runs[number].decode((number * _NUM_TOKENS + token) % engine.vocab_size)
            times.append(time.perf_counter())
        return [later - sooner for sooner, later in itertools.pairwise(times)]

    with ThreadPoolExecutor(NUM_FORKS) as pool:
        return statistics.median(itertools.chain.from_iterable(pool.map(decode, range(NUM_FORKS))))


def _attention(engine: TransformersEngine, past: torch.Tensor, tail: Tail) -> float:
    """One pass of all forks' queries over the prefix, in every layer, by the attention that the engine computes with."""
    heads = engine.model.config.get_text_config(decoder=True).num_attention_heads
    num_kv_heads, dim = past.shape[2], past.shape[4]
    read = Past([Piece(past, 0, past.shape[3])], tail, None)
    times = []
    with torch.inference_mode():
        if engine.kernel is not None and engine.kernel.reads([read], NUM_FORKS):
            rows = torch.ones((NUM_FORKS, heads, dim), dtype=past.dtype)
            compiled = KernelPast(engine.kernel, [read], [NUM_FORKS])
            passes = partial(compiled.attend, query=rows, scale=None)
        else:
            folded = torch.ones(
                (1, num_kv_heads, heads // num_kv_heads * NUM_FORKS, dim), dtype=past.dtype, device=past.device
            )
            passes = partial(_over_layer, past, folded)
        for _ in range(_NUM_TOKENS - 1):
            started = time.perf_counter()
            for layer in range(past.shape[0]):
                passes(layer)
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def _over_layer(past: torch.Tensor, query: torch.Tensor, layer: int) -> torch.Tensor:
    keys, values = past[layer]
    return flash(query, keys[None], values[None], None, causal=False)[0]
