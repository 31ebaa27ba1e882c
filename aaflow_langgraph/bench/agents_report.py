"""``bench agents`` for people and machines: tables on stderr, one JSON document on stdout, the same tables in Markdown.

Only formats; what the numbers mean is in agents.py and pairs.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

_WIDTH = 120
_ROW_NAMES = ("side", "p50 s", "p95 s", "max s", "all s", "CPU s", "tok/s", "KV", "equal", "KL", "runs")
_PAIR_NAMES = ("side", "CPU", "CPU + prefill", "tok/s", "TTFT p50", "TTFT max", "pairs")


def report(document: dict[str, Any], facts: dict[str, Any]) -> None:
    """Tables and notes on stderr, the document with ``facts`` about model and versions as the last line of stdout."""
    console = Console(stderr=True)
    console.width = max(console.width, _WIDTH)  # better a long line than a number that is cut
    for context in document["contexts"]:
        tokens = context["context"]
        for count in dict.fromkeys(row["agents"] for row in document["rows"]):
            rows, pairs = _of(document, "rows", tokens, count), _of(document, "pairs", tokens, count)
            console.print(
                _table(f"{count} agents on {tokens:,} tokens, {facts['dtype']}", _ROW_NAMES, _cells(rows, context))
            )
            if pairs:
                console.print(_table("how many times better handles-batched is", _PAIR_NAMES, _pair_cells(pairs)))
        for line in dict.fromkeys(f"{row['side']}: {_note(row)}" for row in _of(document, "rows", tokens)):
            console.print(line, highlight=False, soft_wrap=True)
        console.print(_prefill(context), highlight=False, soft_wrap=True)
        for stream in _of(document, "streams", tokens):
            beside = "" if stream["handles"] is None else f"; handles {_ratio(stream['handles'])}"
            console.print(
                f"one stream behind {tokens:,} tokens, {stream['side']}: {stream['tok_s']:.1f} tokens/s{beside}",
                highlight=False,
                soft_wrap=True,
            )
    if document["streams_note"]:
        console.print(document["streams_note"], highlight=False, soft_wrap=True)
    console.print(
        f"{facts['model']}. p50, p95, max: time to first token; KV: in contexts; equal: tokens equal to text-serial's; KL: of "
        "the first token from text-serial's, in nats; *: computed from some of the agents, or from shapes",
        soft_wrap=True,
    )
    sys.stdout.write(json.dumps(document | facts) + "\n")


def write_markdown(document: dict[str, Any], path: Path) -> None:
    """The tables for a page, overwriting the file."""
    parts = []
    for context in document["contexts"]:
        tokens = context["context"]
        parts.append(_prefill(context))
        for count in dict.fromkeys(row["agents"] for row in document["rows"]):
            rows, pairs = _of(document, "rows", tokens, count), _of(document, "pairs", tokens, count)
            parts.append(f"{count} agents on {tokens:,} tokens:")
            parts.append(_markdown(_ROW_NAMES, _cells(rows, context)))
            if pairs:
                parts.append(_markdown(_PAIR_NAMES, _pair_cells(pairs)))
        if streams := _of(document, "streams", tokens):
            cells = [(s["side"], f"{s['tok_s']:.1f}", _ratio(s["handles"]), str(s["rounds"])) for s in streams]
            parts.append(_markdown(("one stream", "tok/s", "handles", "rounds"), cells))
    if document["streams_note"]:
        parts.append(f"{document['streams_note']}.")
    path.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


def _of(document: dict[str, Any], what: str, context: int, agents: int | None = None) -> list[dict[str, Any]]:
    return [row for row in document[what] if row["context"] == context and (agents is None or row["agents"] == agents)]


def _cells(rows: list[dict[str, Any]], context: dict[str, Any]) -> list[tuple[str, ...]]:
    cells = []
    for row in rows:
        if row["total_s"] is None:
            cells.append((row["side"], *["-"] * (len(_ROW_NAMES) - 1)))
            continue
        by_times = ("ttft_p50_s", "ttft_p95_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s")
        cells.append(
            (
                row["side"],
                *(_short(row[name]) + ("*" if name in row["computed"] else "") for name in by_times),
                f"{_short(row['kv_bytes'] / context['context_bytes'])}x"
                + ("*" if "kv_bytes" in row["computed"] else ""),
                "-" if row["agreement"] is None else f"{row['agreement']:.0%}",
                "-" if row["first_token_kl"] is None else f"{row['first_token_kl']:.0e}",
                str(row["rounds"]),
            )
        )
    return cells


def _pair_cells(pairs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    names = ("cpu", "cpu_with_prefill", "out_tok_s", "ttft_p50", "ttft_max")
    return [
        (
            pair["side"] + ("*" if pair["is_computed"] else ""),
            *(_ratio(pair[name]) for name in names),
            str(pair["num_pairs"]),
        )
        for pair in pairs
    ]


def _ratio(ratio: dict[str, float] | None) -> str:
    if ratio is None:
        return "-"
    return f"{_short(ratio['median'])}x ({_short(ratio['min'])}-{_short(ratio['max'])})"


def _prefill(context: dict[str, Any]) -> str:
    stock = context["stock_prefill_cpu_s"]
    by_stock = "" if stock is None else f"; {stock:.2f} CPU s by the stock modules, for copies"
    return (
        f"Before: {context['context']:,} tokens prefilled once, {context['shared_prefill_cpu_s']:.2f} CPU s and "
        f"{context['shared_prefill_s']:.2f} s with handles{by_stock}."
    )


def _note(row: dict[str, Any]) -> str:
    measured = row["agents_measured"]
    by = f"computed from {measured} agents a round; " if 0 < measured < row["agents"] else ""
    return f"{by}{row['note']}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _table(title: str, names: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> Table:
    table = Table(title=title, box=None, padding=(0, 1), pad_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name == names[0] else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row)
    return table


def _markdown(names: tuple[str, ...], cells: Sequence[tuple[str, ...]]) -> str:
    head = f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}"
    return "\n".join([head, *(f"| {' | '.join(cell.replace('*', chr(92) + '*') for cell in row)} |" for row in cells)])
