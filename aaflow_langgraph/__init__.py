"""KV cache as a first-class value of a LangGraph graph: state carries handles, a broker moves the KV behind them.

Names load on first use, so that importing a channel or a handle does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker as KVBroker
    from aaflow_langgraph.chat.model import KVChatModel as KVChatModel
    from aaflow_langgraph.checkpoint.saver import KVCheckpointSaver as KVCheckpointSaver
    from aaflow_langgraph.composite import KVComposite as KVComposite
    from aaflow_langgraph.engine.sampling import Sampling as Sampling
    from aaflow_langgraph.engine.transformers import TransformersEngine as TransformersEngine
    from aaflow_langgraph.errors import AAFlowError as AAFlowError
    from aaflow_langgraph.explain.miss import explain_miss as explain_miss
    from aaflow_langgraph.graph.channels import KVBranches as KVBranches
    from aaflow_langgraph.graph.channels import KVChannel as KVChannel
    from aaflow_langgraph.graph.compose_channel import KVCompose as KVCompose
    from aaflow_langgraph.graph.compose_node import compose_node as compose_node
    from aaflow_langgraph.graph.lineages import KVMessagesState as KVMessagesState
    from aaflow_langgraph.graph.lineages import kv_state as kv_state
    from aaflow_langgraph.graph.nodes import generate_node as generate_node
    from aaflow_langgraph.graph.nodes import prefill_node as prefill_node
    from aaflow_langgraph.handle import KVHandle as KVHandle
    from aaflow_langgraph.results import Generation as Generation
    from aaflow_langgraph.results import Usage as Usage

__version__ = "0.1.0"

_HOMES = {
    "AAFlowError": "errors",
    "Generation": "results",
    "KVBranches": "graph.channels",
    "KVBroker": "broker",
    "KVChannel": "graph.channels",
    "KVChatModel": "chat.model",
    "KVCheckpointSaver": "checkpoint.saver",
    "KVCompose": "graph.compose_channel",
    "KVComposite": "composite",
    "KVHandle": "handle",
    "KVMessagesState": "graph.lineages",
    "Sampling": "engine.sampling",
    "TransformersEngine": "engine.transformers",
    "Usage": "results",
    "compose_node": "graph.compose_node",
    "explain_miss": "explain.miss",
    "generate_node": "graph.nodes",
    "kv_state": "graph.lineages",
    "prefill_node": "graph.nodes",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
