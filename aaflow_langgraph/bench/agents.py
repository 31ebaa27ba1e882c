"""What N agents on one shared context cost: KV handles against what else could be run on the same model.

Question. N agents get the same context, a question of ``new`` tokens each, and generate ``output`` tokens each. When does
each have its first token, when are all done, and what does it cost?

Sides, in turns in one run, on the same weights, threads, tokens and stop rules (greedy, exactly ``output`` tokens):

* ``text-serial``, ``text-batched``: stock ``generate`` on context + question, one after another, and in one batch;
* ``deepcopy-serial``, ``deepcopy-batched``: stock ``generate`` behind a deep copy of a ``DynamicCache`` of the context, one
  per agent; batched, one copy repeated along the batch;
* ``hf-continuous``: transformers' ``generate_batch`` with block sharing, the context in its cache already;
* ``handles-serial``, ``handles-batched``: a LangGraph graph, one ``prefill_node``, ``Send`` to N ``generate_node``s, one at a
  time (``max_concurrency=1``) and all at once (``max_concurrency=N``);
* ``vllm``, ``llama.cpp``: servers in an environment of their own, with the context in their cache already.

All agents ask at one moment, and every time counts from it: in a serial side the last agent waits for all others. For
handles that moment is the call of the graph: LangGraph's own work and the lookup of the KV are inside. The first
prefill of the context is not: it is paid once and reported apart, and the ratios are given without and with it.

Physics. Text passing runs N * context tokens through the model. Copies save that, but each step reads N copies of the
context's KV. Handles read it once per step for all agents, and the weights too.

``handles-batched`` runs right beside every run of every other side, before it or behind it in turns; those two are a pair
(pairs.py), and the sides that there are bars for have ``rounds`` of them, all others ``slow_rounds``. Where all agents of a
side would take minutes it runs some of them, others in each round, and what follows for N is named in ``computed``: agents of
a serial side do not influence each other, and a batch that fills the machine with prefill is followed by the next.

``agreement`` is the share of tokens, position by position, that equal ``text-serial``'s, over the agents it ran; greedy paths
that part once stay apart, and in 16 bits they part by rounding alone: ``deepcopy-serial`` shows how much.
``first_token_kl`` is the divergence of a side's first token from ``text-serial``'s, in nats, the mean over up to
four of those agents.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from aaflow_langgraph.bench import streams
from aaflow_langgraph.bench.lineup import HANDLES, NAMES, Lineup
from aaflow_langgraph.bench.measured import Measured, Row, rounds_of
from aaflow_langgraph.bench.pairs import Pairs
from aaflow_langgraph.bench.sides import make_task, without_end
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ContextTooLong

_STREAM_TOKENS = 64


def run(
    engine: TransformersEngine,
    agents: Sequence[int],
    contexts: Sequence[int],
    new: int,
    output: int,
    rounds: int,
    slow_rounds: int,
    names: Sequence[str] = NAMES,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """Measure every number of agents on every context (cut to the window). The result is a JSON-ready document.

    Args:
        names: Sides to run; ``handles-batched`` always does.
        whole: Run all agents of every side: nothing is computed but bytes.

    Raises:
        ContextTooLong: ``new`` and ``output`` fill the window. Way out: fewer of them.
    """
    if new + output >= engine.window:
        raise ContextTooLong(f"{new} new and {output} output tokens leave no context in a window of {engine.window}")
    started = time.perf_counter()
    counts = sorted(set(agents))
    rows: list[Row] = []
    pairs: list[Pairs] = []
    alone: list[streams.Stream] = []
    facts: list[dict[str, Any]] = []
    with without_end(engine, output), Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("", total=None)
        for context in sorted({min(wanted, engine.window - new - output) for wanted in contexts}):
            progress.update(bar, description=f"{context:,} tokens, first prefills")
            task = make_task(engine, context, max(counts), new, output)
            with Lineup(engine, task, max(counts), names, whole=whole) as lineup:
                per_count = sum(2 * rounds_of(side, rounds, slow_rounds) for side in lineup.others)
                progress.update(bar, completed=0, total=max(rounds, per_count) * len(counts))
                for count in counts:  # ascending: the peak of a pool is since it was opened

                    def tell(name: str, words: str = f"{context:,} tokens, {count} agents") -> None:
                        progress.update(bar, advance=1, description=f"{words}, {name}")

                    measured = Measured(lineup, count, context, output)
                    measured.run(rounds, slow_rounds, tell)
                    rows += measured.rows()
                    pairs += measured.pairs()
                if output > 1:
                    progress.update(bar, description=f"{context:,} tokens, single streams")
                    room = engine.window - context - new
                    alone += streams.measure(lineup, context, min(_STREAM_TOKENS, room), rounds)
                facts.append(_facts(engine, lineup, context))
    return {
        "schema": 2,
        "name": "bench agents",
        "shared_prefill_cpu_s": facts[-1]["shared_prefill_cpu_s"],  # of the longest context
        "contexts": facts,
        "new": new,
        "output": output,
        "rounds": rounds,
        "slow_rounds": slow_rounds,
        "threads": torch.get_num_threads(),
        "took_s": round(time.perf_counter() - started, 1),
        "rows": [asdict(row) for row in rows],
        "pairs": [asdict(pair) for pair in pairs],
        "streams": [asdict(stream) for stream in alone],
        "streams_note": "" if output > 1 else streams.NO_RATE,
    }


def _facts(engine: TransformersEngine, lineup: Lineup, context: int) -> dict[str, Any]:
    handles = [lineup.prefills[name] for name in (HANDLES, "handles-serial") if name in lineup.prefills]
    stock = lineup.stock_prefill
    return {
        "context": context,
        "context_bytes": engine.layout.num_bytes(context),
        "shared_prefill_cpu_s": round(statistics.median(prefill.cpu_s for prefill in handles), 3),
        "shared_prefill_s": round(statistics.median(prefill.wall_s for prefill in handles), 3),
        "stock_prefill_cpu_s": None if stock is None else round(stock.cpu_s, 3),
        "stock_prefill_s": None if stock is None else round(stock.wall_s, 3),
    }
