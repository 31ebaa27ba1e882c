"""What ``aaflow inspect`` shows to people. Knows rich; asks nobody."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from aaflow_langgraph.inspection.view import TIERS, Seen, document

_STYLES = {"alive": "green", "silent": "yellow", "dead": "red", "absent": "dim"}


def tables(seen: Sequence[Seen]) -> RenderableType:
    """One block a namespace: a line of sums, its owners, its extents by tier."""
    if not seen:
        return Text("nothing is there: no namespace has an entry in the index or a file in the directory")
    blocks: list[RenderableType] = []
    for one in document(seen)["namespaces"]:
        files = one["files"]
        sums = (
            f"{one['num_leases']} leases ({one['num_leases_over']} over their time), {one['num_claims']} claims, "
            f"{one['num_recipes']} recipes, {one['num_uses']} uses"
        )
        if files is not None:
            sums += (
                f"; files: {files['num_extents']} extents of {files['num_tokens']:,} tokens, {files['num_recipes']} recipes, "
                f"{size(files['num_bytes'])}"
            )
        blocks.append(Text(f"namespace {one['namespace']}", style="bold"))
        blocks.append(Text(sums))
        if one["owners"]:
            owners = make_table(
                "owner", "is", "process", "lease left", "extents", "published", "capacity", right_from=3
            )
            for owner in one["owners"]:
                left_s = owner["lease_left_s"]
                owners.add_row(
                    Text(printable(owner["owner"][:12])),
                    Text(owner["condition"], style=_STYLES[owner["condition"]]),
                    Text(printable(" ".join(str(part) for part in (owner["pid"], owner["process"]) if part))),
                    "none" if left_s is None else f"{left_s:.1f} s",
                    f"{owner['num_extents']:,}",
                    size(owner["used_bytes"]) if owner["capacity_bytes"] else "",
                    size(owner["capacity_bytes"]) if owner["capacity_bytes"] else "",
                )
            blocks.append(owners)
        if not one["owners"] and not any(summed["num_extents"] for summed in one["extents"].values()):
            continue
        extents = make_table("extents", "number", "tokens", "bytes", right_from=1)
        for tier in TIERS:
            summed = one["extents"][tier]
            name = {"host": "in memory only", "disk": "on disk only", "both": "in memory and on disk"}[tier]
            extents.add_row(name, f"{summed['num_extents']:,}", f"{summed['num_tokens']:,}", size(summed["num_bytes"]))
        blocks.append(extents)
    return Group(*blocks)


def printable(text: str) -> str:
    """Names from outside, as they may be written to a terminal: no control characters, no bytes that are no text."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def size(num_bytes: int) -> str:
    """Bytes for people."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.1f} {unit}"
    return f"{num_bytes} B"


def make_table(*names: str, right_from: int) -> Table:
    """An empty one; columns from ``right_from`` on are numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number >= right_from else "left")
    return table
