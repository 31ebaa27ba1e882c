"""What one decode step costs, ours against the stock modules.

Question. A step reads every weight once, and the context's KV once. How much time goes to the rest?

Legs, interleaved round by round in one process, same weights, same threads: ``stock_s`` is one token through transformers
with its own cache and attention, ``step_s`` one token of a run of ours behind the same context. ``ratio`` = step_s /
stock_s. Medians over rounds, spread = (max - min) / median.

Behind a context, where steps of several requests share a forward, also one step of 16 forks beside its bound (fork_step.py):
``forks`` is None elsewhere.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache

from aaflow_langgraph.bench import fork_step
from aaflow_langgraph.bench.ttft import timed
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ContextTooLong

CONTEXTS = (0, 1024, 7777)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result; seconds are medians over the rounds."""

    context: int
    stock_s: float
    step_s: float
    ratio: float
    stock_spread: float
    step_spread: float
    forks: fork_step.ForkStep | None = None


@dataclass(slots=True)
class _Tail:
    """A tail of fixed room outside of any pool."""

    kv: torch.Tensor
    start: int
    length: int = 0

    def ensure(self, num_tokens: int) -> None:
        """The room is fixed."""


def run(engine: TransformersEngine, contexts: Iterable[int] | None, rounds: int, seed: int = 0) -> list[Row]:
    """Measure a step on an empty cache and behind ``contexts`` (None: 0, 1,024 and 7,777, as far as the window goes)."""
    wanted = [c for c in CONTEXTS if c < engine.window] if contexts is None else sorted({0, *contexts})
    if max(wanted) >= engine.window:
        raise ContextTooLong(f"context {max(wanted)} and one token exceed the window of {engine.window} tokens")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, engine.vocab_size, (max(wanted) + 1,), generator=generator).tolist()

    def tail(start: int, num_tokens: int) -> _Tail:
        kv = torch.zeros(engine.layout.shape(num_tokens), dtype=engine.model.dtype, device=engine.device)
        return _Tail(kv, start)

    whole = tail(0, max(wanted) + 1)
    if len(ids) > 1:
        engine.start((), whole, grid=None).prefill(ids[:-1])
    rows = []
    for context in wanted:
        past = whole.kv[..., :context, :]
        pieces = [Piece(past, 0, context)] if context else []
        legs: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds + 1):
            token_id = ids[number % len(ids)]
            ours = engine.start(pieces, tail(context, 2), grid=None)
            step = timed(partial(ours.decode, token_id), engine.device)
            cache = DynamicCache(config=engine.model.config)
            if context:
                for layer, (keys, values) in enumerate(past):
                    cache.update(keys[None], values[None], layer)
            with engine.stock_attention():
                stock = timed(partial(engine.forward, [token_id], context, cache), engine.device)
            if number:  # the first one warms up
                legs[0].append(stock)
                legs[1].append(step)
        stock_s, step_s = (statistics.median(leg) for leg in legs)
        stock_spread, step_spread = (round((max(leg) - min(leg)) / statistics.median(leg), 3) for leg in legs)
        forks = fork_step.measure(engine, past, tail, rounds) if context and engine.batches else None
        row = Row(
            context, round(stock_s, 5), round(step_s, 5), round(step_s / stock_s, 3), stock_spread, step_spread, forks
        )
        rows.append(row)
    return rows


def report(rows: list[Row], engine: TransformersEngine, rounds: int, versions: dict[str, str]) -> None:
    """A table for people on stderr, one JSON line as the last line of stdout."""
    facts: dict[str, Any] = {
        "model": engine.namespace.model,
        "dtype": engine.namespace.dtype,
        "read_path": engine.read_path,
        "attention": engine.attention,
        "lean": engine.lean is not None,
    }
    table = Table(title=f"one-token step, {', '.join(f'{name} {value}' for name, value in facts.items())}")
    for name in (
        "context",
        "stock ms",
        "step ms",
        "step / stock",
        "spread",
        "16 forks ms",
        "bound ms",
        "forks / bound",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.context:,}",
            f"{row.stock_s * 1e3:,.1f}",
            f"{row.step_s * 1e3:,.1f}",
            f"{row.ratio:.2f}x",
            f"{row.stock_spread:.0%} {row.step_spread:.0%}",
            *_fork_cells(row.forks),
        )
    Console(stderr=True).print(table)
    document = {
        "schema": 1,
        "name": "bench step",
        "rows": [asdict(row) for row in rows],
        "rounds": rounds,
        **facts,
        "baseline": "one token through the stock transformers modules and their own cache",
        "versions": versions,
    }
    sys.stdout.write(json.dumps(document) + "\n")


def _fork_cells(forks: fork_step.ForkStep | None) -> tuple[str, ...]:
    if forks is None:
        return ("", "", "")
    return (f"{forks.step_s * 1e3:,.1f}", f"{forks.bound_s * 1e3:,.1f}", f"{forks.ratio:.2f}x {forks.ratio_spread:.0%}")
