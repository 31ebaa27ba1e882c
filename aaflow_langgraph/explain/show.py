"""Reports for people and for machines. Knows rich; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from aaflow_langgraph.explain.report import CAUSES, Difference, MissReport
from aaflow_langgraph.inspection.table import make_table, printable


def misses_table(reports: Sequence[MissReport]) -> RenderableType:
    """A line for each request, and behind the table a block for each that missed."""
    if not reports:
        return Text("nothing was asked for yet: run the graph first")
    table = make_table("request", "edge", "cause", "context", "reused", "reusable", "lost", right_from=3)
    blocks: list[RenderableType] = [table]
    for report in reports:
        style = "yellow" if report.is_miss else "green"
        table.add_row(
            f"{report.number}",
            Text(printable(edge_of(report.source, report.node, report.label))),  # as text: names are no markup
            Text(CAUSES[report.cause], style=style),
            *(f"{count:,}" for count in (report.num_context, report.num_reused, report.num_reusable, report.num_lost)),
        )
        if report.is_miss:
            blocks.append(Text(f"{report.number}: {printable(report.why)}", style="bold"))
            blocks += [Text(f"   {line}") for line in lines_of(report.difference)]
            blocks.append(Text(f"   {report.mend}"))
    return Group(*blocks)


def misses_document(reports: Sequence[MissReport]) -> dict[str, Any]:
    """As JSON."""
    return {"schema": 1, "name": "misses", "reports": [report.to_dict() for report in reports]}


def edge_of(source: str, node: str, label: str = "") -> str:
    """``"plan -> reason"``; a request that no node made goes by its label."""
    name = node or label or "(no node)"
    return f"{source} -> {name}" if source and source != node else name


def lines_of(difference: Difference | None) -> list[str]:
    """The texts around a difference, one a line; none where they are switched off."""
    if difference is None or not (difference.asked or difference.known):
        return []
    return [
        f"before {difference.before!r}",
        f"asked  {difference.asked!r}",
        f"known  {difference.known!r}",
    ]
