"""LangGraph side: channels that hold handles, nodes that pass them, serialisers that let them through.

Names load on first use, so that importing a channel does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aaflow_langgraph.graph.channels import KVBranches as KVBranches
    from aaflow_langgraph.graph.channels import KVChannel as KVChannel
    from aaflow_langgraph.graph.compose_channel import KVCompose as KVCompose
    from aaflow_langgraph.graph.compose_node import compose_node as compose_node
    from aaflow_langgraph.graph.lineages import KVLineages as KVLineages
    from aaflow_langgraph.graph.lineages import KVMessagesState as KVMessagesState
    from aaflow_langgraph.graph.lineages import kv_state as kv_state
    from aaflow_langgraph.graph.node import KVNode as KVNode
    from aaflow_langgraph.graph.nodes import generate_node as generate_node
    from aaflow_langgraph.graph.nodes import prefill_node as prefill_node
    from aaflow_langgraph.graph.rejected import RejectedWrite as RejectedWrite
    from aaflow_langgraph.graph.rejected import rejected_writes as rejected_writes
    from aaflow_langgraph.graph.serde import MSGPACK_ALLOWLIST as MSGPACK_ALLOWLIST
    from aaflow_langgraph.graph.serde import handle_serializer as handle_serializer

_HOMES = {
    "KVBranches": "channels",
    "KVChannel": "channels",
    "KVCompose": "compose_channel",
    "KVLineages": "lineages",
    "KVMessagesState": "lineages",
    "KVNode": "node",
    "MSGPACK_ALLOWLIST": "serde",
    "RejectedWrite": "rejected",
    "compose_node": "compose_node",
    "generate_node": "nodes",
    "kv_state": "lineages",
    "handle_serializer": "serde",
    "prefill_node": "nodes",
    "rejected_writes": "rejected",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
