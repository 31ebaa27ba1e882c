"""Runs an example twice, with KV handles and with text passing, and compares every token of its answers and what they cost.

Text passing is the same application on a broker with ``kv=False``: handles and nodes stay, and every request prefills all of
its tokens, as it does when state carries text. Both run in float32, where greedy answers do not hang on the order of sums; the
exit status is 1 if one token differs. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: threads that spin starve each other
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # but some microseconds of it are cheaper than a sleep and a waking

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from langchain_core.runnables import RunnableConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from aaflow_langgraph import (
    AAFlowError,
    KVBroker,
    KVChatModel,
    Sampling,
    TransformersEngine,
    assets,
    generate_node,
    prefill_node,
)

POOL_BYTES = 256 << 20


@dataclass
class Run:
    """One run of a graph: its last state, and the usage of every call of a node, in order."""

    state: dict[str, Any]
    usages: list[Mapping[str, Any]] = field(default_factory=list)

    def of(self, node: str) -> list[Mapping[str, Any]]:
        return [usage for usage in self.usages if usage["node"] == node]

    def total(self, count: str, node: str | None = None) -> int:
        return sum(usage[count] for usage in (self.usages if node is None else self.of(node)))


def nodes_of(broker: KVBroker, max_tokens: int = 32) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``prefill_node`` and ``generate_node`` of an example: on this broker, with short answers."""
    return partial(prefill_node, broker), partial(generate_node, broker, sampling=Sampling(max_tokens=max_tokens))


def run(graph: Any, given: Any, config: RunnableConfig | None = None) -> Run:
    """Run ``graph`` on ``given``, its subgraphs watched, too."""
    done = Run({})
    for path, mode, part in graph.stream(given, config, stream_mode=["custom", "values"], subgraphs=True):
        if mode == "values" and not path:
            done.state = part
        elif mode == "custom" and part.get("type") == "aaflow.usage":
            done.usages.append(part)
    return done


def main(example: str, about: str, build: Callable[[KVBroker], Any], given: Any, shown: Sequence[str]) -> int:
    """The example as a command: build the graph on either kind of broker, run it on ``given``, compare."""

    def both(engine: TransformersEngine) -> tuple[Run, Run]:
        runs = []
        for kv in (True, False):
            with KVBroker.open(engine, pool_bytes=POOL_BYTES, kv=kv) as broker:
                runs.append(run(build(broker), given))
        return runs[0], runs[1]

    return command(example, about, both, shown)


def chat_main(example: str, about: str, build: Callable[[KVChatModel], Any], questions: Sequence[str]) -> int:
    """The same for an application of messages: ask it ``questions``, one a turn, in one thread; compare all its conversations."""

    def both(engine: TransformersEngine) -> tuple[Run, Run]:
        runs = []
        for kv in (True, False):
            with KVBroker.open(engine, pool_bytes=POOL_BYTES, kv=kv) as broker:
                runs.append(converse(build(KVChatModel(broker, max_tokens=32)), broker, questions))
        return runs[0], runs[1]

    return command(example, about, both, ["answers"])


def converse(graph: Any, broker: KVBroker, questions: Sequence[str]) -> Run:
    """Ask ``graph`` one question a turn. What its models said and read is in the broker's journal."""
    answers = []
    for question in questions:
        state = graph.invoke({"messages": [("user", question)]}, {"configurable": {"thread_id": "1"}})
        answers.append(state["messages"][-1].text.strip())
    entries = broker.journal.entries()
    usages = [
        {
            "node": entry.node,
            "num_context": entry.num_context,
            "num_reused": entry.num_reused,
            "num_prefilled": entry.num_context - entry.num_reused,
            "ttft_ms": entry.ttft_s * 1000,
        }
        for entry in entries
    ]
    return Run({"answers": answers, "conversations": [entry.kv_id for entry in entries]}, usages)


def command(
    example: str, about: str, both: Callable[[TransformersEngine], tuple[Run, Run]], shown: Sequence[str]
) -> int:
    """The same for an example that makes its two runs, with handles and with text, itself."""
    arguments = parse(about)
    try:
        engine = load(arguments.model)
        handles, text = both(engine)
    except AAFlowError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    return report(example, Path(engine.namespace.model).name, handles, text, shown)


def load(model: str) -> TransformersEngine:
    """``model``, a hub id or a directory, or the demo model."""
    transformers.utils.logging.disable_progress_bar()
    return TransformersEngine.load(model or assets.demo_model(), dtype="float32")


def parse(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--model", default="", help="hub id or local directory (default: the pinned demo model)")
    return parser.parse_args()


def report(example: str, model: str, handles: Run, text: Run, shown: Sequence[str]) -> int:
    """Print both runs and what they cost; 1 if they differ, else 0."""
    out = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for key in shown:
        out.print(f"[bold]{key}[/]  {escape(str(handles.state[key]).strip())}")
    table = Table(title=escape(f"{example}: KV handles against text passing ({model})"), title_justify="left")
    columns = ("node", "calls", "context", "reused", "prefilled", "with text", "TTFT", "with text")
    for column in columns:
        table.add_column(column, justify="left" if column == "node" else "right")
    for node in dict.fromkeys(usage["node"] for usage in handles.usages):
        counts = [handles.total(count, node) for count in ("num_context", "num_reused", "num_prefilled")]
        times = [statistics.median(usage["ttft_ms"] for usage in side.of(node)) for side in (handles, text)]
        cells = [len(handles.of(node)), *counts, text.total("num_prefilled", node)]
        table.add_row(node, *(f"{cell:,}" for cell in cells), *(f"{time:,.0f} ms" for time in times))
    out.print(table)
    # A handle names token ids: where states are equal, so is every token behind them.
    equal = handles.state == text.state
    out.print("Every token is the same both ways." if equal else "[bold red]The two ways differ.[/]")
    sides = {"kv": handles, "text": text}
    document = {
        "schema": 1,
        "name": example,
        "answers_equal": equal,
        "calls": len(handles.usages),
        "tokens_reused": {name: side.total("num_reused") for name, side in sides.items()},
        "tokens_prefilled": {name: side.total("num_prefilled") for name, side in sides.items()},
        "ttft_ms": {name: statistics.median(usage["ttft_ms"] for usage in side.usages) for name, side in sides.items()},
        "model": model,
    }
    print(json.dumps(document))
    return 0 if equal else 1
