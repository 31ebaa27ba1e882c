"""What composing costs and what it does to the next token, beside the dense forward over the same tokens.

Two questions, on documents of the country factbook:

* **Cost.** Four documents of a quarter of ``tokens`` each, prefilled apart. CPU seconds of all threads, because a join is short and
  other programs want the cores: per round, in turns, dense (ordinary chunked prefill of all of the composite's tokens) and
  each rung over the same documents; another order of them every round, so that nothing is found ready. The first document is
  read where it lies on every rung but dense. ``cost_of_dense`` is the median of the rounds' ratios.
* **Quality.** The permutation workload (permutations.py): what is behind the question, against dense.

``correlation`` is Spearman's between a composite's mean deviation at the check layer and how far it is from dense, over all
approximate composites, and within each rung over those that it made: the second is what a threshold on deviation relies on.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aaflow_langgraph.bench.permutations import DENSE, NO_CONTEXT, Rung, Seen, Workload, ladder, orders_of
from aaflow_langgraph.bench.questions import NUM_DOCUMENTS, cases, long_documents
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import ConfigError

_NUM_LONG = 4
_LEGS: tuple[tuple[str, Rung, float | None], ...] = (
    ("re-rotation alone", Rung("legolink", k=0), 0.03),
    ("legolink k=16", Rung("legolink", k=16), 0.10),
    ("legolink k=64", Rung("legolink", k=64), None),
    ("blend r=0.15", Rung("blend", r=0.15), 0.25),
    ("blend r=1", Rung("blend", r=1.0), 1.1),
    ("suffix", Rung("suffix"), None),
)
_AGAIN = "re-rotation, nothing measured"


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds of one way to join, medians over ``rounds``; ``spread`` is (max - min) / median of the rounds' ratios."""

    leg: str
    tokens: int
    recomputed: int
    cpu_s: float
    cost_of_dense: float
    spread: float
    bar: float | None
    rounds: int


@dataclass(frozen=True, slots=True)
class Row:
    """A rung over all questions and orders: means, and where said medians. None where a number makes no sense.

    ``nll_excess`` is over dense in the same order of the same question: some rungs are seen in one order only.
    """

    rung: str
    k: int | None
    r: float | None
    composites: int
    cost_of_dense: float | None
    kl: float | None
    kl_median: float | None
    top1: float | None
    nll: float | None
    nll_excess: float | None
    deviation: float | None
    deviation_max: float | None
    accuracy: float | None


def measure_costs(
    engine: TransformersEngine, folder: Path, tokens: int, rounds: int, tell: Callable[[str], None], seed: int = 0
) -> list[Cost]:
    """Cost of every leg over ``tokens`` tokens of four documents."""
    documents = long_documents(folder, engine.frame.encode, tokens // _NUM_LONG, _NUM_LONG)
    orders = list(itertools.permutations(range(_NUM_LONG)))
    random.Random(seed).shuffle(orders)
    taken: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    with KVBroker.open(engine, pool_bytes=engine.layout.num_bytes(4 * tokens + 4096)) as broker:
        handles = [broker.materialize(ids) for ids in documents]
        # Evicting a composite stops at what others build on: something that no composite goes on with.
        other = next(token_id for token_id in range(engine.vocab_size) if all(token_id != ids[0] for ids in documents))
        for handle in handles:
            broker.append(handle, [other])
        # What is measured once per model and machine is measured here; the last order is in no round.
        broker.evict(broker.compose([handles[number] for number in orders[-1]], rung="blend").handle)
        for number in range(rounds):
            order = orders[number % (len(orders) - 1)]
            parts = [handles[place] for place in order]
            legs = [("dense", DENSE), *((name, rung) for name, rung, _ in _LEGS)]
            for name, rung in legs[number % len(legs) :] + legs[: number % len(legs)]:
                tell(name)
                started = time.process_time()
                composed = broker.compose(parts, **rung.options())
                taken.setdefault(name, []).append(time.process_time() - started)
                counts[name] = composed.report.num_recomputed
                broker.evict(composed.handle)
                if rung.k == 0:
                    # What was made once and evicted is made again from its recipe, without a look at deviations.
                    started = time.process_time()
                    broker.compose(parts, **rung.options())
                    taken.setdefault(_AGAIN, []).append(time.process_time() - started)
                    counts[_AGAIN] = 0
                    broker.evict(composed.handle)
                if rung.name in ("dense", "suffix"):
                    broker.materialize(documents[order[0]])  # it was evicted with what begins with it
    bars = {name: bar for name, _, bar in _LEGS} | {"dense": None, _AGAIN: 0.03}
    return [_cost(name, taken, counts, sum(map(len, documents)), bar) for name, bar in bars.items()]


def _cost(name: str, taken: dict[str, list[float]], counts: dict[str, int], num_tokens: int, bar: float | None) -> Cost:
    ratios = [mine / dense for mine, dense in zip(taken[name], taken["dense"], strict=True)]
    middle = statistics.median(ratios)
    return Cost(
        name,
        num_tokens,
        counts[name],
        round(statistics.median(taken[name]), 4),
        round(middle, 4),
        round((max(ratios) - min(ratios)) / middle, 3),
        bar,
        len(ratios),
    )


def run(
    engine: TransformersEngine,
    folder: Path,
    *,
    tokens: int,
    rounds: int,
    questions: int,
    orders: int,
    ks: Sequence[int],
    rs: Sequence[float],
) -> tuple[dict[str, Any], list[Seen]]:
    """Measure both. The first result is a JSON-ready document, the second what it was made from.

    Raises:
        ConfigError: Fewer than two questions or more orders than there are, or documents are missing. Way out: as said.
    """
    if questions < 2:
        raise ConfigError("at least 2 questions: the control with other documents takes them from another question")
    if orders > math.factorial(NUM_DOCUMENTS):
        raise ConfigError(f"{NUM_DOCUMENTS} documents have {math.factorial(NUM_DOCUMENTS)} orders, {orders} asked for")
    asked = cases(folder, questions)
    rungs = ladder(ks, rs)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("cost", total=rounds * (len(_LEGS) + 1))

        def tell(name: str) -> None:
            progress.update(bar, advance=1, description=f"cost, {name}")

        costs = measure_costs(engine, folder, tokens, rounds, tell)
        once = sum(rung.name in ("suffix", "prefix") or rung.r == 1 for rung in rungs)
        total = questions * (orders * (len(rungs) - once + 1) + once)
        task = progress.add_task("quality", total=total)
        workload = Workload(engine, rungs, lambda: progress.advance(task))
        seen = list(workload.run(asked, orders_of(orders)))
    document = {
        "schema": 1,
        "name": "bench compose",
        "rows": [asdict(row) for row in rows_of(seen)],
        "cost": [asdict(cost) for cost in costs],
        "correlation": correlations(seen),
        "questions": questions,
        "orders": orders,
        "documents": NUM_DOCUMENTS,
    }
    return document, seen


def rows_of(seen: Sequence[Seen]) -> list[Row]:
    """One row per rung, in the order they were first seen; dense and no context in front."""
    rungs = sorted(dict.fromkeys(one.rung for one in seen), key=lambda rung: rung not in (DENSE, NO_CONTEXT))
    dense = _dense_nll(seen)
    return [_row(rung, [one for one in seen if one.rung == rung], dense) for rung in rungs]


def _row(rung: Rung, seen: Sequence[Seen], dense: Mapping[tuple[int, int], float]) -> Row:
    ratios = [one.cpu_s / one.dense_cpu_s for one in seen if one.cpu_s is not None]
    judged = [one for one in seen if not math.isnan(one.kl)]
    deviations = [one for one in judged if one.deviation is not None]
    answers = [one.is_right for one in seen if one.is_right is not None]
    return Row(
        rung=rung.name,
        k=rung.k,
        r=rung.r,
        composites=len(seen),
        cost_of_dense=_rounded(statistics.median, ratios),
        kl=_rounded(statistics.fmean, [one.kl for one in judged]),
        kl_median=_rounded(statistics.median, [one.kl for one in judged]),
        top1=_rounded(statistics.fmean, [one.top1 for one in judged]),
        nll=_rounded(statistics.fmean, [one.nll for one in judged]),
        nll_excess=_rounded(statistics.fmean, [one.nll - dense[one.question, one.order] for one in judged]),
        deviation=_rounded(statistics.fmean, [one.deviation or 0.0 for one in deviations]),
        deviation_max=_rounded(statistics.fmean, [one.deviation_max or 0.0 for one in deviations]),
        accuracy=_rounded(statistics.fmean, answers),
    )


def _rounded(middle: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return round(float(middle(values)), 5) if values else None


def correlations(seen: Sequence[Seen]) -> dict[str, dict[str, float | None]]:
    """Spearman's rank correlation of mean deviation with KL and with the likelihood that is lost, over all composites and
    within every rung.
    """
    dense = _dense_nll(seen)
    measured = [one for one in seen if one.deviation is not None]
    groups = {"all": measured}
    for one in measured:
        groups.setdefault(str(one.rung), []).append(one)
    measures: dict[str, Callable[[Seen], float]] = {
        "kl": lambda one: one.kl,
        "nll_excess": lambda one: one.nll - dense[one.question, one.order],
    }
    return {
        name: {
            group: _spearman([(one.deviation or 0.0, of(one)) for one in members]) for group, members in groups.items()
        }
        for name, of in measures.items()
    }


def _dense_nll(seen: Sequence[Seen]) -> dict[tuple[int, int], float]:
    return {(one.question, one.order): one.nll for one in seen if one.rung == DENSE}


def _spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    if len(pairs) < 3:
        return None
    ranks = torch.tensor(pairs, dtype=torch.float64).argsort(stable=True, dim=0).argsort(dim=0).double()
    return round(float(torch.corrcoef(ranks.T)[0, 1]), 3)


def report(document: dict[str, Any], engine: TransformersEngine, versions: dict[str, str]) -> None:
    """Tables for people on stderr, one JSON line for machines as the last line of stdout."""
    console, model = Console(stderr=True), engine.namespace
    table = Table(title=f"joining {document['cost'][0]['tokens']:,} tokens of {_NUM_LONG} documents, {model.dtype}")
    for name in ("leg", "tokens run", "CPU s", "of dense", "spread", "bar"):
        table.add_column(name, justify="left" if name == "leg" else "right")
    for cost in document["cost"]:
        table.add_row(
            cost["leg"],
            f"{cost['recomputed']:,}",
            f"{cost['cpu_s']:.3f}",
            f"{cost['cost_of_dense']:.3f}",
            f"{cost['spread']:.0%}",
            "-" if cost["bar"] is None else f"{cost['bar']:g}",
        )
    console.print(table)
    table = Table(
        title=f"{document['questions']} questions, {document['documents']} documents in {document['orders']} orders"
    )
    for name in ("rung", "n", "of dense", "KL", "median", "top-1", "NLL", "over dense", "deviation", "right"):
        table.add_column(name, justify="left" if name == "rung" else "right")
    for row in document["rows"]:
        name = str(Rung(row["rung"], row["k"], row["r"]))
        cells = (
            row[key]
            for key in ("cost_of_dense", "kl", "kl_median", "top1", "nll", "nll_excess", "deviation", "accuracy")
        )
        table.add_row(name, str(row["composites"]), *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    console.print(table)
    table = Table(title="rank correlation of a composite's mean deviation with")
    for name in ("composites of", "KL", "NLL over dense"):
        table.add_column(name, justify="left" if name == "composites of" else "right")
    found = document["correlation"]
    for group in found["kl"]:
        both = (found[measure][group] for measure in ("kl", "nll_excess"))
        table.add_row(group, *("-" if value is None else f"{value:.2f}" for value in both))
    console.print(table)
    facts = {
        "model": model.model,
        "dtype": model.dtype,
        "read_path": engine.read_path,
        "attention": engine.attention,
        "versions": versions,
    }
    sys.stdout.write(json.dumps(document | facts) + "\n")
