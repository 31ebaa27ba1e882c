"""Where tokens went, summed by the node that asked and by the edge that a handle came along. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import quantiles
from typing import Any

from aaflow_langgraph.journal import Entry
from aaflow_langgraph.studio.lineage import Lineage

MOST_CHARS = 256
"""Of a name from outside, for example a thread id: nobody bounds them."""


def entry_document(entry: Entry, lineage: Lineage) -> dict[str, Any]:
    """One request: numbers, names and ids; no tokens, no text."""
    return {
        "number": entry.number,
        "at_s": entry.at_s,
        "operator": entry.operator,
        "node": entry.node[:MOST_CHARS],
        "thread": entry.thread[:MOST_CHARS],
        "label": entry.label,
        "kv_id": entry.kv_id,
        "parent": entry.parent,
        "parent_label": _label(lineage, entry.parent),
        "num_context": entry.num_context,
        "num_reused": entry.num_reused,
        "num_prefilled": entry.num_context - entry.num_reused,
        "num_reusable": entry.num_reusable,
        "num_missed": num_missed(entry),
        "num_decoded": entry.num_decoded,
        "num_recomputed": entry.num_recomputed,
        "ttft_s": entry.ttft_s,
        "total_s": entry.total_s,
        "nearest": entry.nearest,
        "nearest_label": _label(lineage, entry.nearest),
        "num_nearest": entry.num_nearest,
    }


def num_missed(entry: Entry) -> int:
    """Tokens that were prefilled though a known prompt begins with the same: they could have been reused."""
    return max(0, entry.num_reusable - entry.num_reused)


def by_node(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """A line for each node, in the order of their first requests; requests that no node made go by their operator."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.node, "" if entry.node else entry.operator), []).append(entry)
    return [{"node": node[:MOST_CHARS], "operator": operator, **sums(its)} for (node, operator), its in groups.items()]


def by_edge(entries: Sequence[Entry], lineage: Lineage) -> list[dict[str, Any]]:
    """A line for each pair of nodes between which handles were passed on."""
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        if entry.parent is not None:
            groups.setdefault((lineage.maker(entry.parent), entry.node or entry.operator), []).append(entry)
    return [
        {"source": source[:MOST_CHARS], "target": target[:MOST_CHARS], **sums(its)}
        for (source, target), its in groups.items()
    ]


def sums(entries: Iterable[Entry]) -> dict[str, Any]:
    """Of one or more requests."""
    its = list(entries)
    times = sorted(entry.ttft_s for entry in its)
    return {
        "num_requests": len(its),
        "num_handles": len({entry.kv_id for entry in its}),
        "num_context": sum(entry.num_context for entry in its),
        "num_reused": sum(entry.num_reused for entry in its),
        "num_reusable": sum(entry.num_reusable for entry in its),
        "num_prefilled": sum(entry.num_context - entry.num_reused for entry in its),
        "num_missed": sum(num_missed(entry) for entry in its),
        "num_recomputed": sum(entry.num_recomputed for entry in its),
        "num_decoded": sum(entry.num_decoded for entry in its),
        "ttft_p50_s": _quantile(times, 50),
        "ttft_p95_s": _quantile(times, 95),
        "last_number": its[-1].number,
    }


def _quantile(ascending: Sequence[float], percent: int) -> float:
    if len(ascending) == 1:
        return ascending[0]
    return quantiles(ascending, n=100, method="inclusive")[percent - 1]


def _label(lineage: Lineage, kv_id: str | None) -> str:
    entry = lineage.first(kv_id) if kv_id is not None else None
    return entry.label if entry is not None else ""
