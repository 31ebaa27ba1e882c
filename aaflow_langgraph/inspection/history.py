"""``aaflow history``: what it prints. Knows rich and, where a tokenizer is asked for, transformers; looks at nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from aaflow_langgraph.checkpoint.history import Difference, SeenCheckpoint, SeenHandle, Side
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.inspection.table import make_table, printable, size

Decode = Callable[[Sequence[int]], str]

_TIERS = {
    "disk": "on disk",
    "part": "partly on disk",
    "recipe": "recipe only",
    "none": "no recipe",
}
_STYLES = {"disk": "green", "part": "yellow", "recipe": "yellow", "none": "red"}


def history_document(thread_id: str, checkpoints: Sequence[SeenCheckpoint]) -> dict[str, Any]:
    """As JSON: names, numbers and labels, no token ids."""
    return {
        "schema": 1,
        "name": "history",
        "thread_id": thread_id,
        "checkpoints": [asdict(checkpoint) for checkpoint in checkpoints],
    }


def diff_document(thread_id: str, differences: Sequence[Difference], decode: Decode | None) -> dict[str, Any]:
    """As JSON."""
    return {
        "schema": 1,
        "name": "history diff",
        "thread_id": thread_id,
        "differences": [
            asdict(one)
            | (
                {}
                if decode is None
                else {
                    "texts": {
                        "before": decode(one.before),
                        "a": decode(one.a.token_ids),
                        "b": decode(one.b.token_ids),
                    }
                }
            )
            for one in differences
        ],
    }


def history_table(checkpoints: Sequence[SeenCheckpoint]) -> Table:
    """A line for each handle of each checkpoint."""
    table = make_table(
        "checkpoint", "made by", "handle", "tensors", "step", "tokens", "private", "shared", right_from=4
    )
    for one in checkpoints:
        made_by = ", ".join(one.nodes) or one.source
        where = "/".join(part.partition(":")[0] for part in one.checkpoint_ns.split("|") if part)
        first = [
            printable(one.checkpoint_id[-12:]),  # ids of one thread begin alike; ``diff`` takes their ends
            printable(f"{where}/{made_by}" if where else made_by),
            str(one.step) if one.step is not None else "",
            size(one.private_bytes),
            size(one.shared_bytes),
        ]
        shown = [*_named(one.handles, ""), *_named(one.pending, "pending ")] or [("", Text(""), "")]
        for number, (name, tensors, tokens) in enumerate(shown):
            checkpoint, by, step, private, shared = first if number == 0 else [""] * 5
            # Names from outside are not markup.
            table.add_row(Text(checkpoint), Text(by), Text(name), tensors, step, tokens, private, shared)
    return table


def diff_lines(differences: Sequence[Difference], decode: Decode | None) -> list[str]:
    """In words, one block a place."""
    lines = []
    for one in differences:
        name = one.place or "the longest handle"
        if one.position is None:
            lines.append(f"{name}: equal, {one.a.num_tokens:,} tokens ({one.a.kv_id[:12]})")
            continue
        lines.append(f"{name}: {one.position:,} tokens in common, they end {_tokens(one.before, decode)}")
        lines += [_side(letter, side, one.position, decode) for letter, side in (("A", one.a), ("B", one.b))]
    return lines


def tokenizer_of(model: str) -> Decode:
    """How token ids of a model become text.

    Raises:
        ConfigError: It has no tokenizer that can be loaded. Way out: fail.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(f"the tokenizer of {model!r} cannot be loaded: {reason}") from error
    return lambda ids: str(tokenizer.decode(list(ids)))


def _named(handles: Sequence[SeenHandle], front: str) -> list[tuple[str, Text, str]]:
    lines = []
    for handle in handles:
        label = f" {handle.label!r}" if handle.label and handle.label != handle.place else ""
        tensors = Text(_TIERS[handle.tier] + (", durable" if handle.is_durable else ""), style=_STYLES[handle.tier])
        name = f"{front}{handle.place}{label} {handle.kv_id[:12]}".strip()
        lines.append((printable(name), tensors, f"{handle.num_tokens:,}"))
    return lines


def _side(letter: str, side: Side, position: int, decode: Decode | None) -> str:
    by = f"written by {side.written_by}" if side.written_by else "it is not known which node wrote it"
    if not side.token_ids:
        return f"  {letter} {side.kv_id[:12]} ends here"
    return f"  {letter} {side.kv_id[:12]} goes on to {side.num_tokens:,} with {_tokens(side.token_ids, decode)}; {by}"


def _tokens(ids: Sequence[int], decode: Decode | None) -> str:
    text = "" if decode is None else f" {decode(ids)!r}"
    return f"{list(ids)}{text}"
