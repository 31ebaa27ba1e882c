"""How much of a trace each eviction policy hits, beside what could be hit.

Question. Requests share prefixes, and the pool is smaller than all of them together. Which policy finds most of a prefix
still there, and how far is it from a pool that knows the future?

``hit_rate`` = blocks found / blocks asked for, over the whole trace from an empty pool. ``work_saved`` = the same, each
block weighed by what its prefill costs at its position (``evict/cost.py``): a policy that prefers dear blocks trades one for
the other. ``clairvoyant`` is a true upper bound of the hit rate for its pool size (``replay.clairvoyant_hits`` says why), and
not one of the work saved; ``infinite`` bounds both. A policy above a bound would be a fault of this benchmark, and is raised.

The replay calls the policies that the broker calls. It knows prompts only: what decoding adds to a prefix is computed anew
by the next request here, and kept by a broker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aaflow_langgraph.bench.replay import clairvoyant_hits, infinite_hits, policy_hits
from aaflow_langgraph.bench.traces import Trace
from aaflow_langgraph.errors import IntegrityError
from aaflow_langgraph.evict.base import TIES
from aaflow_langgraph.evict.cost import recompute_cost
from aaflow_langgraph.evict.policies import POLICIES

BLOCKS = (1000, 2500, 5000, 10_000, 20_000)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy with one tie rule in one pool."""

    policy: str
    ties: str
    num_blocks: int
    num_hits: int
    hit_rate: float
    work_saved: float


@dataclass(frozen=True, slots=True)
class Result:
    """All rows of a trace and its bounds; ``clairvoyant`` is hits by pool size."""

    trace: Trace
    rows: tuple[Row, ...]
    clairvoyant: dict[int, int]
    infinite: int
    infinite_work: float


def run(
    trace: Trace,
    policies: Sequence[str] = tuple(POLICIES),
    blocks: Sequence[int] = BLOCKS,
    ties: Sequence[str] = ("oldest",),
) -> Result:
    """Replay ``trace`` through every policy, tie rule and pool size.

    Raises:
        IntegrityError: A policy hits more than a bound: the replay or the bound is wrong.
    """
    # Asked for twice is measured once.
    sizes, named = dict.fromkeys(blocks), dict.fromkeys(product(policies, ties))
    hits = infinite_hits(trace.requests)
    infinite, infinite_work = sum(hits), _work_saved(trace, hits)
    clairvoyant: dict[int, int] = {}
    rows: list[Row] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("bench evict", total=len(sizes) * (1 + len(named)))
        for num_blocks in sizes:
            clairvoyant[num_blocks] = sum(clairvoyant_hits(trace.requests, num_blocks))
            progress.advance(task)
            for name, rule in named:
                policy = partial(POLICIES[name], ties=TIES[rule])
                hits = policy_hits(trace.requests, policy, num_blocks, trace.block_tokens)
                if not sum(hits) <= clairvoyant[num_blocks] <= infinite:
                    raise IntegrityError(
                        f"{name} with ties {rule} hits {sum(hits)} in {num_blocks} blocks, the clairvoyant pool "
                        f"{clairvoyant[num_blocks]}, the infinite {infinite}: the replay or a bound is wrong"
                    )
                rate = sum(hits) / max(1, trace.num_blocks)
                rows.append(Row(name, rule, num_blocks, sum(hits), round(rate, 6), _work_saved(trace, hits)))
                progress.advance(task)
    return Result(trace, tuple(rows), clairvoyant, infinite, infinite_work)


def report(result: Result) -> None:
    """A table for people on stderr, one JSON line for machines as the last line of stdout."""
    trace, total = result.trace, max(1, result.trace.num_blocks)
    num_distinct = len({block for chain in trace.requests for block in chain})
    table = Table(
        title=f"hit rate (work saved), {trace.name}: {len(trace.requests):,} requests, {trace.num_blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {num_distinct:,} distinct"
    )
    table.add_column("policy", no_wrap=True)
    table.add_column("ties")
    for num_blocks in result.clairvoyant:
        table.add_column(f"{num_blocks:,}", justify="right")
    by_policy: dict[tuple[str, str], list[str]] = {}
    for row in result.rows:
        cells = by_policy.setdefault((row.policy, row.ties), [])
        cells.append(f"{row.hit_rate:.3f} ({row.work_saved:.3f})")
    for (name, rule), cells in by_policy.items():
        table.add_row(name, rule, *cells)
    table.add_section()
    table.add_row("clairvoyant", "", *(f"{hits / total:.3f}" for hits in result.clairvoyant.values()))
    infinite = f"{result.infinite / total:.3f} ({result.infinite_work:.3f})"
    table.add_row("infinite", "", *(infinite for _ in result.clairvoyant))
    Console(stderr=True).print(table)
    document: dict[str, Any] = {
        "schema": 1,
        "name": "bench evict",
        "trace": trace.name,
        "num_requests": len(trace.requests),
        "num_blocks": trace.num_blocks,
        "num_distinct_blocks": num_distinct,
        "block_tokens": trace.block_tokens,
        "rows": [asdict(row) for row in result.rows],
        "clairvoyant": [
            {"num_blocks": num_blocks, "num_hits": hits, "hit_rate": round(hits / total, 6)}
            for num_blocks, hits in result.clairvoyant.items()
        ],
        "infinite": {
            "num_hits": result.infinite,
            "hit_rate": round(result.infinite / total, 6),
            "work_saved": result.infinite_work,
        },
    }
    sys.stdout.write(json.dumps(document) + "\n")


def _work_saved(trace: Trace, hits: Sequence[int]) -> float:
    saved = sum(recompute_cost(0, num_hit * trace.block_tokens) for num_hit in hits)
    asked = sum(recompute_cost(0, len(chain) * trace.block_tokens) for chain in trace.requests)
    return round(saved / asked, 6) if asked else 0.0
