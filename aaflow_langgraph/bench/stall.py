"""How long running streams wait while a long prompt is prefilled beside them.

Question. ``streams`` requests generate behind one context when a prompt of ``prompt`` tokens comes. What does it do to the time
between two of their tokens, and what do they do to it?

Two kinds of prompt: *behind* goes on from the streams' own context, so its prefill fills what they leave of each forward;
*cold* starts from nothing, so its canonical chunks of 256 tokens run alone, in turns with the forwards of the streams.

``itl_s`` is the median inter-token latency of the streams without it, ``itl_during_s`` and ``itl_max_s`` the median and the
longest while it runs. ``alone_s`` is the same prefill with nobody else at work, measured in the same round: so long the streams
would stand still if it were not interrupted. ``stall_ratio`` = alone_s / itl_max_s; ``slowdown`` = prefill_s / alone_s is what
the streams cost the prefill. Medians over rounds.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from aaflow_langgraph.bench.sides import without_end
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import Cancelled, ConfigError
from aaflow_langgraph.handle import KVHandle

_QUIET_TOKENS = 8
"""Every stream has so many tokens before the prompt comes."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of prompt; seconds are medians over the rounds, ``itl_max_s`` the median of each round's longest."""

    kind: str
    itl_s: float
    itl_during_s: float
    itl_max_s: float
    prefill_s: float
    alone_s: float
    stall_ratio: float
    slowdown: float


def run(engine: TransformersEngine, context: int, prompt: int, streams: int, rounds: int) -> dict[str, Any]:
    """Measure both kinds. The result is a JSON-ready document.

    Raises:
        ConfigError: Context, prompt and what the streams generate do not fit the window. Way out: ask for fewer tokens.
    """
    room = engine.window - context
    if room < prompt + 64:
        raise ConfigError(
            f"{context} tokens of context, {prompt} of the prompt and 64 that the streams need at least are more than the window's "
            f"{engine.window}; ask for fewer"
        )
    most = engine.layout.num_bytes(2 * context + 4 * (prompt + 512) + streams * (room + 512))
    rows: list[Row] = []
    with (
        without_end(engine, room - 16),
        KVBroker.open(engine, pool_bytes=most) as broker,
        Progress(console=Console(stderr=True), transient=True) as progress,
    ):
        docs = broker.materialize(_ids(engine, context, 0))
        bar = progress.add_task("streams beside a prefill", total=2 * rounds)
        for kind in ("behind", "cold"):
            measured = []
            for number in range(rounds):
                ids = [_ids(engine, prompt, 1 + 2 * number + n) for n in range(2)]
                compute = [_prefill(broker, docs if kind == "behind" else None, own) for own in ids]
                measured.append(_round(broker, docs, streams, room - 16, *compute))
                progress.update(bar, advance=1, description=kind)
            rows.append(_row(kind, measured))
    return {
        "schema": 1,
        "name": "bench stall",
        "context": context,
        "prompt": prompt,
        "streams": streams,
        "rounds": rounds,
        "rows": [asdict(row) for row in rows],
    }


def report(document: dict[str, Any]) -> None:
    """A table for people on stderr, one JSON line on stdout."""
    table = Table(
        title=f"{document['streams']} streams behind {document['context']:,} tokens, a prompt of {document['prompt']:,} comes"
    )
    for name in ("prompt", "ITL", "during", "longest", "prefill", "alone", "alone / longest"):
        table.add_column(name, justify="left" if name == "prompt" else "right", no_wrap=True)
    for row in document["rows"]:
        latencies = [f"{row[name] * 1e3:,.0f} ms" for name in ("itl_s", "itl_during_s", "itl_max_s")]
        prefills = [f"{row[name]:.2f} s" for name in ("prefill_s", "alone_s")]
        table.add_row(row["kind"], *latencies, *prefills, f"{row['stall_ratio']:.1f}x")
    Console(stderr=True).print(table)
    sys.stdout.write(json.dumps(document) + "\n")


def _ids(engine: TransformersEngine, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, engine.vocab_size, (count,), generator=generator).tolist()
    return ids


def _prefill(broker: KVBroker, parent: KVHandle | None, ids: list[int]) -> Callable[[], None]:
    def compute() -> None:
        handle = broker.materialize(ids) if parent is None else broker.append(parent, ids)
        broker.evict(handle)

    return compute


def _round(
    broker: KVBroker, docs: KVHandle, streams: int, most: int, alone: Callable[[], None], beside: Callable[[], None]
) -> tuple[float, float, float, float, float]:
    started = time.perf_counter()
    alone()
    alone_s = time.perf_counter() - started
    stop = threading.Event()
    at: list[list[float]] = [[] for _ in range(streams)]
    failed: list[BaseException] = []

    def stream(number: int) -> None:
        prompt = f"{number} is the number of"
        try:
            with suppress(Cancelled):
                broker.generate(
                    prompt,
                    parent=docs,
                    raw=True,
                    sampling=Sampling(max_tokens=most - 32),
                    on_token=lambda _: at[number].append(time.perf_counter()),
                    cancel=stop,
                )
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    try:
        _reach(at, _QUIET_TOKENS, failed)
        began = time.perf_counter()
        beside()
        ended = time.perf_counter()
        _reach(at, max(len(times) for times in at) + 2, failed)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    gaps = [pair for times in at for pair in itertools.pairwise(times)]
    before = [b - a for a, b in gaps if b <= began]
    during = [b - a for a, b in gaps if b > began and a < ended]
    return statistics.median(before), statistics.median(during), max(during), ended - began, alone_s


def _reach(at: list[list[float]], count: int, failed: list[BaseException]) -> None:
    """Wait until every stream has so many tokens."""
    while any(len(times) < count for times in at):
        if failed:
            raise failed[0]
        time.sleep(0.005)


def _row(kind: str, measured: list[tuple[float, float, float, float, float]]) -> Row:
    itl, during, longest, prefill, alone = (statistics.median(values) for values in zip(*measured, strict=True))
    return Row(
        kind,
        round(itl, 4),
        round(during, 4),
        round(longest, 4),
        round(prefill, 4),
        round(alone, 4),
        round(alone / longest, 2),
        round(prefill / alone, 2),
    )
