"""What a node reads, as one handle: composites are joined here, and judges get nothing approximate.

Knows the broker's compose and its report; knows no kind of node. A judge that reads KV which was put together from parts
judges the putting together, too: a verdict must not hang on how its context was cached, so nodes marked as judges read
everything as one prefill has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.graph.stream import stream_writer
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.results import Composed

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker

JUDGES = frozenset({"judge", "critic", "verifier"})
"""Roles of nodes, not of chat turns: no chat template knows them."""


def handle_to_read(
    broker: KVBroker,
    read: KVHandle | KVComposite,
    *,
    node: str,
    gate: str = "",
    deterministic: bool = False,
    kv: bool = True,
) -> KVHandle:
    """The one handle that a node continues.

    Args:
        broker: Joins and computes.
        read: What lies in the state.
        node: Who reads, for the report.
        gate: Why nothing approximate may be read; empty when it may.
        deterministic: As everywhere. No approximate rung keeps bits, so a composite is joined exactly.
        kv: As everywhere. Where nothing is reused, nothing is joined from parts either.
    """
    if isinstance(read, KVHandle):
        return broker.exact(read) if gate else read
    why = gate or ("deterministic" if deterministic else "")
    composed = broker.compose(read, exact=bool(why), gate=why, label=read.kv_label, deterministic=deterministic, kv=kv)
    report_compose(node, composed, read.kv_children)
    return composed.handle


def report_compose(node: str, composed: Composed, segments: Sequence[KVHandle]) -> dict[str, Any]:
    """Send the report of a compose to whoever listens to ``stream_mode="custom"``; the report as plain JSON."""
    report = {
        "kv_id": composed.handle.kv_id,
        "segments": [{"kv_id": segment.kv_id, "label": segment.kv_label} for segment in segments],
        **composed.report.to_dict(),
    }
    stream_writer()({"type": "aaflow.compose", "node": node, **report})
    return report
