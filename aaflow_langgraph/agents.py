"""Middleware for agents of ``langchain.agents.create_agent``. Needs the extra ``agents``, which is langchain.

Knows langchain's agents. What a lineage is, and how a chat model keeps it, it does not know.
"""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from langchain.agents.middleware import AgentMiddleware, AgentState
from langchain.agents.middleware.types import PrivateStateAttr

from aaflow_langgraph.graph.lineages import KVLineages
from aaflow_langgraph.handle import KVHandle


class KVAgentState(AgentState[Any]):
    """An agent's state with ``kv_lineages``, which is neither input nor output."""

    kv_lineages: NotRequired[Annotated[dict[str, KVHandle], KVLineages, PrivateStateAttr]]


class KVMiddleware(AgentMiddleware[KVAgentState, Any, Any]):
    """Keeps the handles of an agent's conversations in its state, and so in its checkpoints.

    ``create_agent(KVChatModel(broker), tools, middleware=[KVMiddleware()], checkpointer=...)``

    It adds the key and nothing else: a ``KVChatModel`` reads and writes it by itself, behind whatever other middleware makes of
    the request. The key is private. An agent that is a node of a graph with ``kv_state`` shares that graph's key instead:
    ``create_agent(..., state_schema=kv_state(AgentState))``.
    """

    state_schema = KVAgentState
