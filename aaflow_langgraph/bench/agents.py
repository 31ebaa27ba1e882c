"""What N agents on one shared context cost: KV handles against what else a user of transformers would run.

Question. N agents get the same context, a question of ``new`` tokens each, and generate ``output`` tokens each. When does
each have its first token, when are all done, and what does it cost?

Sides, in turns in one process, on the same weights, threads, tokens and stop rules (greedy, exactly ``output`` tokens):

* ``text-serial``, ``text-batched``: stock ``generate`` on context + question, one after another, and in one batch;
* ``deepcopy-serial``, ``deepcopy-batched``: stock ``generate`` behind a deep copy of a ``DynamicCache`` of the context, one
  per agent; batched, one copy repeated along the batch;
* ``hf-continuous``: transformers' ``generate_batch`` with block sharing, the context in its cache already;
* ``handles-serial``, ``handles-batched``: a LangGraph graph, one ``prefill_node``, ``Send`` to N ``generate_node``s, one at a
  time (``max_concurrency=1``) and all at once (``max_concurrency=N``).

All agents ask at one moment, and every time counts from it: in a serial side the last agent waits for all others. For
handles that moment is the call of the graph: LangGraph's own work and the lookup of the context are inside. The first
prefill of the context is not: it is paid once and reported apart, for every side that needs one.

Physics. Text passing runs N * context tokens through the model. Copies save that, but each step reads N copies of the
context's KV. Handles read it once per step for all agents, and the weights too.

Slow sides run ``slow_rounds`` times, ``handles-batched`` ``rounds`` times, spread between them. Agents of a serial side do
not influence each other, so where all of them would take minutes the two of transformers run the first ``agents_measured``
only; ``agent_s`` is what one took, and what follows from it for N agents is named in ``computed``.

``agreement`` is the share of tokens, position by position, that equal ``text-serial``'s, over the agents it ran; greedy paths
that part once stay apart, and in 16 bits they part by rounding alone: ``deepcopy-serial`` shows how much.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aaflow_langgraph.bench.continuous import Continuous
from aaflow_langgraph.bench.fan_out import Handles
from aaflow_langgraph.bench.sides import NotRun, Outcome, Side, Text, make_task, shared_cache, without_end
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ContextTooLong

_MEASURED_TOKENS = 16384
"""A serial side of transformers runs as many agents as have about this much context together."""

_PEERS = {
    "vllm": "not run: vLLM needs an environment of its own",
    "llama.cpp": "not run: llama.cpp needs an environment of its own",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A side with N agents: medians over ``rounds``. None where a side did not run; ``note`` says why."""

    side: str
    agents: int
    context: int
    ttft_p50_s: float | None = None
    ttft_max_s: float | None = None
    total_s: float | None = None
    cpu_s: float | None = None
    out_tok_s: float | None = None
    kv_bytes: int | None = None
    agreement: float | None = None
    note: str = ""
    rounds: int = 0
    agents_measured: int = 0
    agent_s: float | None = None
    total_spread: float | None = None
    computed: tuple[str, ...] = ()


def run(
    engine: TransformersEngine,
    agents: Sequence[int],
    context: int,
    new: int,
    output: int,
    rounds: int,
    slow_rounds: int,
) -> dict[str, Any]:
    """Measure every number of agents on one context (cut to the window). The result is a JSON-ready document."""
    if new + output >= engine.window:
        raise ContextTooLong(f"{new} new and {output} output tokens leave no context in a window of {engine.window}")
    context = min(context, engine.window - new - output)
    counts = sorted(set(agents))
    task = make_task(engine, context, max(counts), new, output)
    rows: list[Row] = []
    sides: list[Side] = []
    with without_end(engine, output), Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("shared prefill", total=None)
        try:
            serial = Handles(engine, task, max(counts), batched=False)
            sides.append(serial)
            batched = Handles(engine, task, max(counts), batched=True)
            sides.append(batched)
            cache, stock_cpu_s = shared_cache(engine, task)
            slow: list[Side] = [
                Text(engine, task, batched=False),
                Text(engine, task, batched=True),
                Text(engine, task, batched=False, shared=cache),
                Text(engine, task, batched=True, shared=cache),
                Continuous(engine, task, max(counts)),
                serial,
            ]
            sides += slow[:-1]
            for count in counts:  # ascending: the peak of a pool is since it was opened
                progress.update(bar, completed=0, total=len(slow) * slow_rounds + rounds)

                def tell(name: str, count: int = count) -> None:
                    progress.update(bar, advance=1, description=f"{count} agents, {name}")

                rows += _measure(slow, batched, count, context, (rounds, slow_rounds), output, tell)
        finally:
            for side in sides:
                side.close()
    return {
        "schema": 1,
        "name": "bench agents",
        "shared_prefill_cpu_s": round(statistics.median((serial.prefill_cpu_s, batched.prefill_cpu_s)), 3),
        "stock_prefill_cpu_s": round(stock_cpu_s, 3),
        "context_bytes": engine.layout.num_bytes(context),
        "new": new,
        "output": output,
        "rounds": rounds,
        "slow_rounds": slow_rounds,
        "rows": [asdict(row) for row in rows],
    }


def report(document: dict[str, Any], engine: TransformersEngine, versions: dict[str, str]) -> None:
    """A table for people on stderr, one JSON line for machines as the last line of stdout."""
    model, console = engine.namespace, Console(stderr=True)
    for count in dict.fromkeys(row["agents"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["agents"] == count]
        table = Table(title=f"{count} agents on {rows[0]['context']:,} tokens, {model.dtype}")
        for name in ("side", "p50 s", "max s", "total s", "CPU s", "tok/s", "KV", "agree"):
            table.add_column(name, justify="left" if name == "side" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*_cells(row, document["context_bytes"]))
        console.print(table)
        for row in rows:
            by = f"computed from {row['agents_measured']} agents; " if 0 < row["agents_measured"] < count else ""
            console.print(f"{row['side']}: {by}{row['note']}", highlight=False)
    console.print(
        f"{model.model}. p50, max: time to first token; KV: in contexts. Before: {document['rows'][0]['context']:,} tokens "
        f"prefilled once, {document['shared_prefill_cpu_s']:.2f} CPU s with handles, {document['stock_prefill_cpu_s']:.2f} by "
        "the stock modules"
    )
    facts = {"model": model.model, "dtype": model.dtype, "read_path": engine.read_path, "versions": versions}
    sys.stdout.write(json.dumps(document | facts) + "\n")


def _cells(row: dict[str, Any], context_bytes: int) -> tuple[str, ...]:
    if row["total_s"] is None:
        return (row["side"], *["-"] * 7)
    return (
        row["side"],
        _short(row["ttft_p50_s"]),
        _short(row["ttft_max_s"]),
        _short(row["total_s"]),
        _short(row["cpu_s"]),
        _short(row["out_tok_s"]),
        f"{_short(row['kv_bytes'] / context_bytes)}x",
        f"{row['agreement']:.0%}",
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _measure(
    slow: Sequence[Side],
    fast: Side,
    count: int,
    context: int,
    rounds: tuple[int, int],
    output: int,
    tell: Callable[[str], None],
) -> list[Row]:
    """The rows of one number of agents. ``rounds`` of the fast side lie evenly between those of the slow ones."""
    outcomes: dict[str, list[Outcome]] = {side.name: [] for side in (*slow, fast)}
    notes: dict[str, str] = {}
    fast_rounds, slow_rounds = rounds
    num_slots = len(slow) * slow_rounds
    for slot in range(num_slots):
        side = slow[slot % len(slow)]
        if side.name not in notes:
            try:
                outcomes[side.name].append(side.run(_num_measured(side, count, context)))
            except NotRun as reason:
                notes[side.name] = f"not run: {reason}"
        tell(side.name)
        while len(outcomes[fast.name]) * num_slots < fast_rounds * (slot + 1):
            outcomes[fast.name].append(fast.run(count))
            tell(fast.name)
    truth = outcomes["text-serial"][0].token_ids
    return [
        Row(side.name, count, context, note=notes[side.name])
        if side.name in notes
        else _row(side, outcomes[side.name], truth, count, context, output)
        for side in (*slow, fast)
    ] + [Row(peer, count, context, note=note) for peer, note in _PEERS.items()]


def _num_measured(side: Side, count: int, context: int) -> int:
    """How many agents a round runs."""
    if isinstance(side, Text) and side.is_serial:
        return min(count, max(1, _MEASURED_TOKENS // context))
    return count


def _row(
    side: Side, outcomes: Sequence[Outcome], truth: Sequence[tuple[int, ...]], count: int, context: int, output: int
) -> Row:
    whole = [_extended(outcome, count) for outcome in outcomes]
    num_measured = len(outcomes[0].token_ids)
    computed = ("ttft_p50_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s") if num_measured < count else ()
    totals = [outcome.total_s for outcome in whole]
    total_s = statistics.median(totals)
    pairs = [
        (mine, right)
        for outcome in outcomes
        for ids, first in zip(outcome.token_ids, truth, strict=False)
        for mine, right in zip(ids, first, strict=True)
    ]
    return Row(
        side.name,
        count,
        context,
        ttft_p50_s=round(statistics.median(statistics.median(o.ttft_s) for o in whole), 4),
        ttft_max_s=round(statistics.median(max(o.ttft_s) for o in whole), 4),
        total_s=round(total_s, 4),
        cpu_s=round(statistics.median(o.cpu_s for o in whole), 4),
        out_tok_s=round(count * output / total_s, 2),
        kv_bytes=side.kv_bytes(count),
        agreement=round(sum(mine == right for mine, right in pairs) / len(pairs), 4),
        note=side.note,
        rounds=len(outcomes),
        agents_measured=num_measured,
        agent_s=round(total_s / count, 4),
        total_spread=round((max(totals) - min(totals)) / total_s, 3),
        computed=(*computed, *side.computed),
    )


def _extended(outcome: Outcome, count: int) -> Outcome:
    """What a serial run of some agents says about ``count``: they wait in line, and each takes what those took."""
    num_measured = len(outcome.ttft_s)
    if num_measured == count:
        return outcome
    each_s = outcome.total_s / num_measured
    times = tuple(number * each_s + outcome.own_ttft_s for number in range(count))
    cpu_s = outcome.cpu_s / num_measured * count
    return Outcome(outcome.token_ids, times, each_s * count, cpu_s, outcome.own_ttft_s)
