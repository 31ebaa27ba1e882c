"""Findings for people and for machines. Asks nobody."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.explain.report import CAUSES, Cause
from aaflow_langgraph.explain.show import edge_of, lines_of
from aaflow_langgraph.inspection.table import printable
from aaflow_langgraph.lint.finding import PrefixBreak

_SEEN = {"run": "in one run", "start": "from one start of the app to the next"}


def breaks_text(found: Sequence[PrefixBreak]) -> str:
    """A block of lines for each finding."""
    blocks = []
    for one in found:
        lines = [
            f"{printable(edge_of(one.source, one.node))}: {CAUSES[one.cause]} ({one.cause}), seen {_SEEN[one.seen]}",
            f"  {printable(one.why)}",
            *(f"  {line}" for line in lines_of(one.difference)),
            f"  {one.mend}",
        ]
        blocks.append("\n".join(lines))
    noun = "place is" if len(found) == 1 else "places are"
    return f"{len(found)} {noun} not append-only\n\n" + "\n\n".join(blocks)


def breaks_document(app: str, num_requests: int, nodes: Sequence[str], found: Sequence[PrefixBreak]) -> dict[str, Any]:
    """As JSON."""
    return {
        "schema": 1,
        "name": "lint",
        "app": app,
        "num_requests": num_requests,
        "nodes": list(nodes),
        "findings": [one.to_dict() for one in found],
    }


def check_causes(causes: Collection[str]) -> frozenset[Cause]:
    """``causes`` themselves when each of them is one.

    Raises:
        ConfigError: One is none; says which there are. Way out: fail.
    """
    if isinstance(causes, str) or not all(isinstance(cause, str) and cause in CAUSES for cause in causes):
        raise ConfigError(f"ignore takes names of causes, got {causes!r:.100}; there are {', '.join(CAUSES)}")
    return frozenset(cause for cause in CAUSES if cause in causes)
