"""Time to first token with reuse, against re-prefill and against the bound.

Question. An agent gets a context of C tokens that another agent has prefilled already, and adds N tokens of its own. How
long until its first token?

Legs, interleaved round by round in one process, same weights, same threads:

* ``prefill_s``  stock transformers: one forward over C + N tokens through the model's own attention (logits of the last
  token only, the cheapest way to ask for it);
* ``reuse_s``    this package: from (handle, new token ids) to the logits: lookup, lease, forward over N tokens, release;
* ``bound_s``    what no reuse through stock modules can beat: a stock forward of the N tokens on an empty cache + the bytes of
  the prefix's KV divided by the read bandwidth measured in the same round.

Physics. Re-prefill costs about 2 * parameters * C operations and grows with C; reuse has to read the prefix's KV once and
run N tokens. ``ratio`` = prefill_s / reuse_s, ``of_bound`` = reuse_s / bound_s; medians over rounds, spread = (max - min) /
median. Token ids are random: attention costs the same whatever the tokens say.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedModel

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ContextTooLong

CONTEXTS = (1024, 4096, 7777)
NEW = (1, 16, 64)
_BANDWIDTH_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the result; seconds are medians over the rounds."""

    context: int
    new: int
    prefill_s: float
    reuse_s: float
    bound_s: float
    ratio: float
    of_bound: float
    prefill_spread: float
    reuse_spread: float
    bound_spread: float


def run(engine: TransformersEngine, contexts: Iterable[int] | None, rounds: int, seed: int = 0) -> list[Row]:
    """Measure every (context, new) pair. ``contexts`` None: 1k, 4k, 7,777 and the longest the window allows."""
    longest = engine.window - max(NEW)
    wanted = sorted({*contexts} if contexts is not None else {*CONTEXTS, longest})
    if contexts is not None and max(wanted, default=0) > longest:
        raise ContextTooLong(
            f"context {max(wanted)} and {max(NEW)} new tokens exceed the window of {engine.window}; the longest is {longest}"
        )
    fitting = [context for context in wanted if 1 <= context <= longest]
    pool_bytes = engine.layout.num_bytes(2 * (max(fitting, default=1) + max(NEW)) + 4096)
    generator = torch.Generator().manual_seed(seed)
    rows: list[Row] = []
    memory = torch.ones(_BANDWIDTH_BYTES // 8, dtype=torch.int64, device=engine.device)
    with KVBroker.open(engine, pool_bytes=pool_bytes) as broker, Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("bench ttft", total=len(fitting) * (rounds * len(NEW) + 1))
        for context in fitting:
            ids = torch.randint(0, engine.vocab_size, (context + max(NEW),), generator=generator).tolist()
            handle = broker.materialize(ids[:context])
            progress.advance(task)
            legs: dict[tuple[str, int], list[float]] = {}
            for _ in range(rounds):
                for new in NEW:
                    # Fresh new tokens every round: nothing but the context may be found in the cache.
                    tokens = torch.randint(0, engine.vocab_size, (new,), generator=generator).tolist()
                    taken = {"reuse": timed(partial(broker.first_logits, handle, tokens), engine.device)}
                    with engine.stock_attention():
                        taken["prefill"] = timed(partial(stock_forward, engine, ids[:context] + tokens), engine.device)
                        taken["empty"] = timed(partial(stock_forward, engine, tokens), engine.device)
                    taken["read"] = timed(lambda: memory.sum().item(), engine.device)
                    for leg, seconds in taken.items():
                        legs.setdefault((leg, new), []).append(seconds)
                    progress.advance(task)
            broker.evict(handle)
            for new in NEW:
                reads = [engine.layout.num_bytes(context) * s / _BANDWIDTH_BYTES for s in legs["read", new]]
                bounds = [e + r for e, r in zip(legs["empty", new], reads, strict=True)]
                rows.append(_row(context, new, legs["prefill", new], legs["reuse", new], bounds))
    return rows


def stock_forward(engine: TransformersEngine, ids: list[int]) -> torch.Tensor:
    """Last logits of a forward over ``ids`` on an empty cache of the model's own class; inside ``stock_attention``."""
    model: PreTrainedModel = engine.model
    options: dict[str, Any] = {"logits_to_keep": 1} if engine.keeps_logits else {}
    with torch.no_grad():
        logits: torch.Tensor = model(
            input_ids=torch.tensor([ids], device=engine.device), use_cache=True, **options
        ).logits[0, -1]
    return logits


def report(rows: list[Row], engine: TransformersEngine, rounds: int, versions: dict[str, str]) -> None:
    """A table for people on stderr, one JSON line for machines as the last line of stdout."""
    table = Table(
        title=f"time to first token, {engine.namespace.model}, {engine.namespace.dtype}, {engine.read_path} path"
    )
    for name in (
        "context",
        "new",
        "re-prefill ms",
        "reuse ms",
        "bound ms",
        "re-prefill / reuse",
        "reuse / bound",
        "spread",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.context:,}",
            str(row.new),
            f"{row.prefill_s * 1e3:,.0f}",
            f"{row.reuse_s * 1e3:,.1f}",
            f"{row.bound_s * 1e3:,.1f}",
            f"{row.ratio:.1f}x",
            f"{row.of_bound:.2f}x",
            f"{row.prefill_spread:.0%} {row.reuse_spread:.0%} {row.bound_spread:.0%}",
        )
    Console(stderr=True).print(table)
    document = {
        "schema": 1,
        "name": "bench ttft",
        "rows": [asdict(row) for row in rows],
        "rounds": rounds,
        "model": engine.namespace.model,
        "dtype": engine.namespace.dtype,
        "read_path": engine.read_path,
        "attention": engine.attention,
        "baseline": "stock transformers forward over the whole context, logits of the last token",
        "versions": versions,
    }
    sys.stdout.write(json.dumps(document) + "\n")


def _row(context: int, new: int, prefill: list[float], reuse: list[float], bound: list[float]) -> Row:
    medians = [statistics.median(values) for values in (prefill, reuse, bound)]
    spreads = [(max(v) - min(v)) / m for v, m in zip((prefill, reuse, bound), medians, strict=True)]
    p, r, b = medians
    return Row(
        context,
        new,
        round(p, 5),
        round(r, 5),
        round(b, 5),
        round(p / r, 2),
        round(r / b, 3),
        *(round(s, 3) for s in spreads),
    )


def timed(body: Callable[[], object], device: torch.device) -> float:
    """Seconds of ``body``, the device's queue included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    body()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started
