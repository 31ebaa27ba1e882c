"""State that keeps, beside an application's messages, the handle of every agent's conversation with its model.

    kv_lineages:  {"researcher/model@3f09c2ab": KVHandle, "supervisor@3f09c2ab": KVHandle}

A lineage is one agent's (the nodes around it) with one model and its template. ``KVChatModel`` reads and writes the key by
itself wherever it is in the state of the graph that calls it. What is kept is a hint, never a claim: a prompt reuses what it
shares with it, token by token, and a trimmed, summarised or rewritten conversation just shares less.

Knows states and channels; knows no chat model and no broker.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NotRequired, TypeVar

from langgraph.graph import MessagesState
from pydantic import BaseModel, Field, create_model
from typing_extensions import is_typeddict

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.channels import KVBranches
from aaflow_langgraph.handle import KVHandle

LINEAGES = "kv_lineages"
"""The state key. Nobody else's state has it by chance."""

State = TypeVar("State")


class KVLineages(KVBranches):
    """``KVBranches`` that never conflicts: of several handles for one lineage in one step the longest is kept, of equally long
    ones that with the greater id. Siblings of a ``Send`` are one agent that speaks several times at once.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KVLineages)

    def __hash__(self) -> int:
        return hash(KVLineages)

    def _agreed(self, writes: Iterable[Mapping[str, KVHandle]]) -> dict[str, KVHandle]:
        agreed: dict[str, KVHandle] = {}
        for branches in writes:
            for branch, handle in branches.items():
                agreed[branch] = longest(handle, agreed.get(branch, handle))
        return agreed


class KVMessagesState(MessagesState):
    """LangGraph's ``MessagesState`` with ``kv_lineages`` beside the messages."""

    kv_lineages: NotRequired[Annotated[dict[str, KVHandle], KVLineages]]


def kv_state(state: type[State]) -> type[State]:
    """``state`` with the key ``kv_lineages``: ``StateGraph(kv_state(MyState))``.

    Args:
        state: A typed dict, a dataclass or a pydantic model.

    Returns:
        A subclass of the same kind. Nodes go on reading and writing ``state``.

    Raises:
        ConfigError: It is none of these, or has such a key of another meaning. Way out: fail.
    """
    is_dict, is_model = is_typeddict(state), isinstance(state, type) and issubclass(state, BaseModel)
    if not (is_dict or is_model or (isinstance(state, type) and dataclasses.is_dataclass(state))):
        raise ConfigError(f"a state is a typed dict, a dataclass or a pydantic model, got {state!r:.80}")
    if LINEAGES in _keys(state):
        raise ConfigError(
            f"{state.__name__} has a key {LINEAGES!r} already: it needs no kv_state, or another name for its own"
        )
    name, kept = f"KV{state.__name__}", Annotated[dict[str, KVHandle], KVLineages]
    made: Any
    if is_model:
        made = create_model(name, __base__=state, **{LINEAGES: (kept, Field(default_factory=dict))})  # type: ignore[call-overload]
    elif is_dict:
        made = types.new_class(
            name, (state,), {}, lambda body: body.update(__annotations__={LINEAGES: NotRequired[kept]})
        )
    else:
        field: Any = dataclasses.field(default_factory=dict, kw_only=True)
        made = dataclasses.make_dataclass(name, [(LINEAGES, kept, field)], bases=(state,))
    made.__module__, made.__doc__ = state.__module__, state.__doc__
    return made  # type: ignore[no-any-return]


def longest(a: KVHandle, b: KVHandle) -> KVHandle:
    """Which of two handles of one lineage is kept."""
    return max(a, b, key=lambda handle: (handle.kv_tokens, handle.kv_id))


def _keys(state: Any) -> set[str]:
    return {key for one in state.__mro__ for key in getattr(one, "__annotations__", ())}
