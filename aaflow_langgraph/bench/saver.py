"""What the checkpointer costs beside the saver that it wraps.

Question. Reading is passed on, so it should cost nothing; writing keeps recipes and references first. With many threads in
one database, how much longer does each call take than the wrapped saver's own?

Legs, interleaved call by call on one ``SqliteSaver`` in one directory, same threads, same values (a handle, a question):

* ``get_tuple``  the newest checkpoint of a thread
* ``list``       all checkpoints of a thread
* ``list_all``   the newest 100 of all threads
* ``put``        one more checkpoint of a thread; the wrapped saver's goes to threads of its own

Each is reported as milliseconds of both sides and their ratio, medians over all calls. The tensors are not part of it: the
policy is ``"recipe"``, and writing them is measured by ``bench disk`` and ``bench resume``.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from aaflow_langgraph._cache_dir import cache_dir
from aaflow_langgraph.bench.resume import put_step
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.checkpoint.saver import KVCheckpointSaver
from aaflow_langgraph.engine.transformers import TransformersEngine

STEPS = 3
_NUM_HANDLES = 20
_PUTS = 200
Legs = dict[str, tuple[list[float], list[float]]]


def run(engine: TransformersEngine, threads: int, directory: str | None = None) -> dict[str, Any]:
    """Measure below ``directory`` (default: the cache directory). The result is a JSON-ready document."""
    place = Path(directory) if directory is not None else cache_dir()
    place.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-saver-", dir=place) as folder,
        KVBroker.open(engine, pool_bytes=64 << 20) as broker,
        KVCheckpointSaver.local(folder, broker, durability="recipe") as saver,
    ):
        handles = [broker.materialize([number + 1, number + 2, number + 3]) for number in range(_NUM_HANDLES)]
        for number in range(threads):
            for step in range(STEPS):
                put_step(saver, f"t{number}", step, _values(handles[number % _NUM_HANDLES], step))
        legs: Legs = {}
        for number in range(threads):
            config = {"configurable": {"thread_id": f"t{number}", "checkpoint_ns": ""}}
            _both(legs, "get_tuple", saver, partial(_get_tuple, config))
            _both(legs, "list", saver, partial(_list, config, None))
            if number % 10 == 0:
                _both(legs, "list_all", saver, partial(_list, None, 100))
        for number in range(_PUTS):
            handle = handles[number % _NUM_HANDLES]
            for side, one in enumerate((saver, saver.inner)):
                values = _values(handle, number)
                seconds = _timed(partial(put_step, one, f"new{side}.{number % 10}", number // 10, values))
                legs.setdefault("put", ([], []))[side].append(seconds)
        rows = saver.stats().manifest
    return {
        "schema": 1,
        "name": "bench saver",
        "model": engine.namespace.model,
        "threads": threads,
        "checkpoints": threads * STEPS,
        "references": rows.num_references,
        "legs": {name: _summed(ours, theirs) for name, (ours, theirs) in legs.items()},
    }


def report(document: dict[str, Any]) -> None:
    """A few sentences for people on stderr, one JSON line on stdout."""
    lines = [
        f"{name}: {leg['ours_ms']:.3f} ms, the wrapped saver alone {leg['inner_ms']:.3f} ms: {leg['ratio']:.3f}x"
        for name, leg in document["legs"].items()
    ]
    Console(stderr=True).print(
        f"{document['threads']:,} threads, {document['checkpoints']:,} checkpoints", *lines, sep="\n"
    )
    sys.stdout.write(json.dumps(document) + "\n")


def _both(legs: Legs, name: str, saver: KVCheckpointSaver, call: Callable[[Any], Any]) -> None:
    """Time a call on both sides, each first in turn: who comes second finds the pages in memory."""
    times = legs.setdefault(name, ([], []))
    order = (0, 1) if len(times[0]) % 2 else (1, 0)
    for side in order:
        times[side].append(_timed(partial(call, saver if side == 0 else saver.inner)))


def _get_tuple(config: dict[str, Any], saver: Any) -> None:
    saver.get_tuple(config)


def _list(config: dict[str, Any] | None, limit: int | None, saver: Any) -> None:
    list(saver.list(config, limit=limit))


def _timed(body: Callable[[], Any]) -> float:
    started = time.perf_counter()
    body()
    return time.perf_counter() - started


def _summed(ours: list[float], theirs: list[float]) -> dict[str, float]:
    mine, inner = statistics.median(ours), statistics.median(theirs)
    return {
        "ours_ms": round(mine * 1e3, 4),
        "inner_ms": round(inner * 1e3, 4),
        "ratio": round(mine / inner, 3),
        "calls": len(ours),
    }


def _values(handle: Any, step: int) -> dict[str, Any]:
    return {"plan": handle, "question": f"question {step}"}
