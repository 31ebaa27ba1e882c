"""Retrieval -> planning -> three reasoners -> verdict, with KV handles in the state and with text in the state.

    retrieve ──> plan ──┬──> quote ────┬──> verdict
                        ├──> sentence ─┤
                        └──> short ────┘

With handles, ``retrieve`` prefills the passages once; ``plan`` continues that KV, and the reasoners and the verdict
continue the plan's. With text, as everywhere else, each node sends the conversation so far and the model prefills it anew.

Two legs. *Equality*: one question, ``deterministic=True``, handles against a broker that is empty at every call; every
token must be equal, else the exit status is 1. *Timed*: all questions, handles against stock transformers, in turns;
bf16 rounding differs between the two, so answers may part, and how far they agree is printed. In this leg the three reasoners
decode in one batch: ``shared`` says how many of a node's forwards behind its first token computed for others as well.

The last line of stdout is one JSON document. ``nodes`` counts the nodes that generate, in the timed leg; ``ttft_ms`` has
one entry for each, in one order for both ways; ``tokens_reused`` and ``tokens_prefilled`` are those of the run with
handles, the prefill of the retrieved passages included.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported: threads that spin starve each other
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # but some microseconds of it are cheaper than a sleep and a waking

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from factbook import Factbook, Question
from langgraph.config import get_stream_writer
from langgraph.graph import END, START, StateGraph
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from text_passing import EmptyBroker, StockTransformers, TextModel
from transformers import AutoModelForCausalLM
from typing_extensions import TypedDict

from aaflow_langgraph import (
    AAFlowError,
    KVBroker,
    KVChannel,
    KVHandle,
    Sampling,
    TransformersEngine,
    assets,
    generate_node,
    prefill_node,
)

CONTEXT_TOKENS = 3400
MAX_NEW_TOKENS = 24
PROMPTS = {
    "plan": "Plan, in one sentence, how to answer from the facts above: {question}",
    "quote": "Quote the fact above that answers this: {question}",
    "sentence": "Answer in one short sentence: {question}",
    "short": "Answer in at most three words: {question}",
    "verdict": "Proposed answers:\n1. {quote}\n2. {sentence}\n3. {short}\nGive the final answer to: {question}",
}
REASONERS = ("quote", "sentence", "short")

progress = Console(stderr=True, highlight=False)


class HandleState(TypedDict):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    quote: str
    sentence: str
    short: str
    verdict: str


class TextState(TypedDict):
    question: str
    docs: str
    plan: str
    quote: str
    sentence: str
    short: str
    verdict: str


@dataclass
class NodeRun:
    """What one node did, as its events on the custom stream tell."""

    usage: dict[str, Any] = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""


Runs = dict[str, NodeRun]


def build(schema: type, nodes: Mapping[str, Any]) -> Any:
    """The chain over either kind of state."""
    builder = StateGraph(schema)
    for name, node in nodes.items():
        builder.add_node(name, node)
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "plan")
    for name in REASONERS:
        builder.add_edge("plan", name)
    builder.add_edge(list(REASONERS), "verdict")
    builder.add_edge("verdict", END)
    return builder.compile()


def handle_graph(broker: KVBroker, retrieve: Callable[[HandleState], str], *, deterministic: bool) -> Any:
    """State carries handles."""
    sampling = Sampling(max_tokens=MAX_NEW_TOKENS)

    def generate(name: str, **options: Any) -> Any:
        return generate_node(broker, PROMPTS[name], sampling=sampling, deterministic=deterministic, **options)

    nodes = {
        "retrieve": prefill_node(broker, retrieve, writes="docs", deterministic=deterministic),
        "plan": generate("plan", reads="docs", writes="plan"),
        **{name: generate(name, reads="plan", text_to=name) for name in REASONERS},
        # A judge: whatever is cached how, it reads as one prefill has it.
        "verdict": generate("verdict", reads="plan", text_to="verdict", role="judge"),
    }
    return build(HandleState, nodes)


def text_graph(model: TextModel, retrieve: Callable[[TextState], str]) -> Any:
    """State carries text; nodes report on the custom stream as those of the package do."""

    def generate(name: str) -> Callable[[TextState], dict[str, str]]:
        def node(state: TextState) -> dict[str, str]:
            reply = model(conversation(name, state), MAX_NEW_TOKENS)
            write = get_stream_writer()
            about = {"node": name, "num_context": reply.num_context, "num_reused": reply.num_reused}
            for token_id in reply.token_ids:
                write({"type": "aaflow.token", "node": name, "token_id": token_id, "text": ""})
            write({"type": "aaflow.token", "node": name, "token_id": None, "text": reply.text})
            write({"type": "aaflow.usage", "ttft_ms": reply.ttft_ms, **about})
            return {name: reply.text}

        return node

    nodes = {"retrieve": lambda state: {"docs": retrieve(state)}, **{name: generate(name) for name in PROMPTS}}
    return build(TextState, nodes)


def conversation(name: str, state: TextState) -> list[dict[str, str]]:
    """The messages that lead to a node: the same turns that a handle names."""
    messages = [{"role": "user", "content": state["docs"] + "\n\n" + PROMPTS["plan"].format_map(state)}]
    if name != "plan":
        messages.append({"role": "assistant", "content": state["plan"]})
        messages.append({"role": "user", "content": PROMPTS[name].format_map(state)})
    return messages


def run(graph: Any, question: Question, what: str) -> tuple[Runs, float]:
    """Run the chain on one question; what every node did, and seconds in all."""
    progress.print(f"{what}: {question.text}")
    runs: Runs = {}
    began = time.perf_counter()
    for event in graph.stream({"question": question.text}, stream_mode="custom"):
        node = runs.setdefault(event["node"], NodeRun())
        if event["type"] == "aaflow.usage":
            node.usage = event
            progress.print(f"  {event['node']:<9} {event['ttft_ms']:>8,.0f} ms", style="dim")
        else:
            node.text += event["text"]
            if event["token_id"] is not None:
                node.token_ids.append(event["token_id"])
    return runs, time.perf_counter() - began


def retriever(book: Factbook, tokenizer: Any) -> Callable[[Any], str]:
    """BM25 passages for the question, the best last and nearest to the prompt, up to the budget of tokens."""

    def retrieve(state: Any) -> str:
        chosen: list[str] = []
        num_tokens = 0
        for passage in book.search(state["question"], 500):
            num_tokens += len(tokenizer.encode(f"{passage}\n", add_special_tokens=False))
            if num_tokens > CONTEXT_TOKENS:
                break
            chosen.append(str(passage))
        return "\n".join(reversed(chosen))

    return retrieve


def ask(book: Factbook) -> list[Question]:
    """Three questions made from fields, whose answers are the fields."""
    return [
        book.ask("What is the capital of {country}?", "Kenya", "Government", "Capital", "name"),
        book.ask("What is the highest point of {country}?", "Japan", "Geography", "Elevation", "highest point"),
        book.ask("How long is the coastline of {country}?", "Chile", "Geography", "Coastline"),
    ]


def equality_leg(engine: TransformersEngine, retrieve: Callable[[Any], str], question: Question) -> bool:
    """Are all tokens of all nodes equal with handles and with text?"""
    with KVBroker.open(engine, pool_bytes=pool_bytes(engine, 1)) as broker:
        handles, _ = run(handle_graph(broker, retrieve, deterministic=True), question, "equality, handles")
    texts, _ = run(text_graph(EmptyBroker(engine), retrieve), question, "equality, text")
    equal = True
    for name in PROMPTS:
        reused = texts[name].usage["num_reused"]
        if reused:
            progress.print(f"{name}: the run with text reused {reused} tokens; it must compute all", style="bold red")
        if handles[name].token_ids != texts[name].token_ids:
            progress.print(f"{name}: {handles[name].text!r} is not {texts[name].text!r}", style="bold red")
        equal = equal and not reused and handles[name].token_ids == texts[name].token_ids
    return equal


def pool_bytes(engine: TransformersEngine, num_questions: int) -> int:
    """Room for the contexts of all questions and what the nodes add to them, twice over."""
    return engine.layout.num_bytes(2 * num_questions * (CONTEXT_TOKENS + 1500))


def agreement(handles: Runs, texts: Runs) -> tuple[int, int]:
    """How many token positions are equal, of how many."""
    equal = total = 0
    for name in PROMPTS:
        a, b = handles[name].token_ids, texts[name].token_ids
        equal += sum(x == y for x, y in zip(a, b, strict=False))
        total += max(len(a), len(b))
    return equal, total


def table_of(question: Question, handles: Runs, texts: Runs) -> Table:
    table = Table(title=escape(f"{question.text}  (factbook: {question.gold})"), title_justify="left")
    for column in ("node", "context", "reused", "prefilled", "shared", "TTFT handles", "TTFT text", "ratio"):
        table.add_column(column, justify="left" if column == "node" else "right", no_wrap=True)
    table.add_column("answer with handles")
    table.add_column("with text")
    for name in ("retrieve", *PROMPTS):
        usage, text = handles[name].usage, texts.get(name)
        counts = [f"{usage[key]:,}" for key in ("num_context", "num_reused", "num_prefilled")]
        counts.append(f"{usage['num_shared']} of {num_steps(usage)}" if usage["num_decoded"] else "")
        shown = ["", "", "passages prefilled once", "passages as text"]
        if text is not None:
            ratio = text.usage["ttft_ms"] / usage["ttft_ms"]
            same = text.text == handles[name].text
            shown = [f"{text.usage['ttft_ms']:,.0f} ms", f"{ratio:,.0f}x", escape(handles[name].text.strip())]
            shown.append("the same" if same else escape(text.text.strip()))
        table.add_row(name, *counts, f"{usage['ttft_ms']:,.0f} ms", *shown)
    return table


def num_steps(usage: Mapping[str, Any]) -> int:
    """Forwards behind the first token. The last token of an answer needs none, unless it is the end of the turn."""
    return max(0, int(usage["num_decoded"]) - (usage["num_decoded"] == MAX_NEW_TOKENS))


def main() -> int:
    try:
        return demo()
    except AAFlowError as error:
        progress.print(f"{type(error).__name__}: {error}", style="bold red", markup=False)
        return 2


def demo() -> int:
    parser = argparse.ArgumentParser(description="The same chain with KV handles and with text: tokens and times.")
    parser.add_argument("--model", default="", help="hub id or local directory (default: the pinned demo model)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    arguments = parser.parse_args()

    transformers.utils.logging.disable_progress_bar()
    model = arguments.model or str(assets.demo_model())
    book = Factbook(assets.factbook())
    engine = TransformersEngine.load(model, dtype=arguments.dtype)
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=engine.model.dtype).to(engine.device).eval()
    plain = StockTransformers(stock, engine.tokenizer)
    retrieve = retriever(book, engine.tokenizer)
    questions = ask(book)

    equal = equality_leg(engine, retrieve, questions[0])
    plain([{"role": "user", "content": "Name a country. " * 64}], 2)  # first-use costs are nobody's

    out = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    pairs: list[tuple[Runs, Runs]] = []
    seconds = {"handles": 0.0, "text": 0.0}
    with KVBroker.open(engine, pool_bytes=pool_bytes(engine, len(questions))) as broker:
        graphs = {
            "handles": handle_graph(broker, retrieve, deterministic=False),
            "text": text_graph(plain, retrieve),
        }
        for number, question in enumerate(questions):
            done = {}
            for way in ("handles", "text") if number % 2 == 0 else ("text", "handles"):
                done[way], took = run(graphs[way], question, f"timed, {way}")
                seconds[way] += took
            pairs.append((done["handles"], done["text"]))
            out.print(table_of(question, *pairs[-1]))
        findings = broker.check()

    ttft = {
        "kv": [handles[name].usage["ttft_ms"] for handles, _ in pairs for name in PROMPTS],
        "text": [texts[name].usage["ttft_ms"] for _, texts in pairs for name in PROMPTS],
    }
    ratio = statistics.median(text / kv for kv, text in zip(ttft["kv"], ttft["text"], strict=True))
    usages = [node.usage for handles, _ in pairs for node in handles.values()]
    reused, prefilled = (sum(usage[key] for usage in usages) for key in ("num_reused", "num_prefilled"))
    reasoners = [handles[name].usage for handles, _ in pairs for name in REASONERS]
    shared, steps = sum(usage["num_shared"] for usage in reasoners), sum(map(num_steps, reasoners))
    counts = [agreement(*pair) for pair in pairs]
    agreed = sum(equal for equal, _ in counts) / sum(total for _, total in counts)
    right = {
        way: sum(
            q.gold.lower() in pair[which]["verdict"].text.lower() for q, pair in zip(questions, pairs, strict=True)
        )
        for which, way in enumerate(("handles", "text"))
    }

    out.print(f"Equality leg, deterministic, every token of every node: {'equal' if equal else 'NOT EQUAL'}")
    out.print(f"Time to first token, median over {len(ttft['kv'])} nodes: {ratio:.0f} times shorter with handles")
    out.print(f"Tokens with handles: {reused:,} reused, {prefilled:,} prefilled ({reused / prefilled:.1f} to 1)")
    out.print(f"The three reasoners side by side: {shared} of their {steps} decode steps shared a forward")
    out.print(f"Whole chains: {seconds['handles']:.0f} s with handles, {seconds['text']:.0f} s with text")
    out.print(f"Agreement with stock transformers: {agreed:.0%} of token positions", end="")
    out.print(
        "" if engine.model.dtype == torch.float32 else " (bf16 rounds differently in both; --dtype float32 agrees)"
    )
    out.print(
        f"Verdicts that hold the factbook's answer: {right['handles']} of {len(questions)} with handles, ", end=""
    )
    out.print(f"{right['text']} with text (the demo model has 135 million parameters)" if not arguments.model else "")
    for finding in findings:
        out.print(f"{finding.invariant} violated: {finding.what}", style="bold red")

    document = {
        "schema": 1,
        "name": "demo",
        "context_tokens": round(statistics.median(h["retrieve"].usage["num_context"] for h, _ in pairs)),
        "nodes": len(ttft["kv"]),
        "tokens_reused": reused,
        "tokens_prefilled": prefilled,
        "reasoner_steps": steps,
        "reasoner_steps_shared": shared,
        "ttft_ms": {way: [round(ms, 1) for ms in values] for way, values in ttft.items()},
        "ttft_ratio_median": round(ratio, 1),
        "answers_equal": equal,
        "agreement": round(agreed, 3),
        "model": Path(model).name if Path(model).is_dir() else model,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("aaflow-langgraph", "torch", "transformers", "langgraph")},
        },
    }
    print(json.dumps(document), flush=True)
    return 0 if equal and not findings else 1


if __name__ == "__main__":
    sys.exit(main())
