"""How much of what applications of messages could reuse is reused, in six shapes that people build on LangGraph.

Question. An application keeps its messages and takes a ``KVChatModel``. Of its prompt tokens, how many are reusable at all (the
longest common token prefix with anything computed before), how many of these are served from KV, and are its answers those
of text passing?

Legs. Every application (``bench.apps``) holds one thread of ``num_turns`` turns, once with KV and once with ``kv=False``, each on a
broker of its own; the broker's journal says what every request read and what it could have read.

``reusable_share`` = reusable over all prompt tokens: what the shape allows. ``served`` = reused over reusable: what we do with it.
``answers_equal`` compares the names of all conversations, which are hashes of all their tokens; in bf16 greedy answers may part
at near-ties, in float32 they do not.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from aaflow_langgraph.bench.apps import SHAPES, converse
from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.chat.model import KVChatModel
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.journal import Entry

POOL_BYTES = 512 << 20


def run(model: str, dtype: str, num_turns: int, max_tokens: int) -> dict[str, Any]:
    """Measure every shape. The result is a JSON-ready document."""
    engine = TransformersEngine.load(model, dtype=dtype)
    progress = Console(stderr=True)
    shapes: dict[str, dict[str, Any]] = {}
    for name in SHAPES:
        with_kv, seconds = talk(engine, name, num_turns, max_tokens, kv=True)
        without, text_seconds = talk(engine, name, num_turns, max_tokens, kv=False)
        shapes[name] = summary(with_kv) | {
            "answers_equal": names(with_kv) == names(without),
            "seconds": round(seconds, 1),
            "text_seconds": round(text_seconds, 1),
        }
        progress.print(f"{name}: {shapes[name]}")
    return {
        "schema": 1,
        "name": "bench shapes",
        "model": Path(engine.namespace.model).name,
        "dtype": engine.namespace.dtype,
        "turns": num_turns,
        "max_tokens": max_tokens,
        "shapes": shapes,
        "answers_equal": all(shape["answers_equal"] for shape in shapes.values()),
    }


def talk(
    engine: TransformersEngine, shape: str, num_turns: int, max_tokens: int, *, kv: bool
) -> tuple[tuple[Entry, ...], float]:
    """One thread of an application: its requests, and seconds in all."""
    with KVBroker.open(engine, pool_bytes=POOL_BYTES, kv=kv) as broker:
        started = time.perf_counter()
        converse(SHAPES[shape](KVChatModel(broker, max_tokens=max_tokens)), num_turns)
        return broker.journal.entries(), time.perf_counter() - started


def summary(entries: tuple[Entry, ...]) -> dict[str, Any]:
    """Sums over the requests of an application."""
    num_context, num_reusable, num_reused = (
        sum(getattr(entry, count) for entry in entries) for count in ("num_context", "num_reusable", "num_reused")
    )
    return {
        "calls": len(entries),
        "prompt_tokens": num_context,
        "reusable_tokens": num_reusable,
        "reused_tokens": num_reused,
        "reusable_share": round(num_reusable / num_context, 4),
        "served": round(num_reused / num_reusable, 4) if num_reusable else 1.0,
    }


def names(entries: tuple[Entry, ...]) -> list[str]:
    """All conversations, siblings in any order."""
    return sorted(entry.kv_id for entry in entries)


def report(document: dict[str, Any]) -> None:
    """A table for people on stderr, one JSON line on stdout."""
    title = f"{document['turns']} turns each, {document['model']}, {document['dtype']}"
    table = Table(title=title, title_justify="left")
    for column in ("shape", "calls", "prompt tokens", "reusable", "served from KV", "prefilled", "same answers"):
        table.add_column(column, justify="left" if column == "shape" else "right")
    for name, shape in document["shapes"].items():
        counts = (f"{shape['calls']:,}", f"{shape['prompt_tokens']:,}")
        shares = (f"{shape['reusable_share']:.1%}", f"{shape['served']:.1%}")
        prefilled = f"{shape['prompt_tokens'] - shape['reused_tokens']:,}"
        table.add_row(name, *counts, *shares, prefilled, "yes" if shape["answers_equal"] else "no")
    Console(stderr=True).print(table)
    sys.stdout.write(json.dumps(document) + "\n")
