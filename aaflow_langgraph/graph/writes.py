"""What LangGraph hands to a channel and hears from it: the empty checkpoint, ``Overwrite`` in its three forms, a conflict.

Knows LangGraph's carriers; knows no handle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langgraph.channels.last_value import LastValue
from langgraph.errors import ErrorCode, InvalidUpdateError, create_error_message
from langgraph.types import Overwrite

# The sentinel of an empty checkpoint is private to LangGraph; an empty channel of its own hands it out.
MISSING: Any = LastValue(object).checkpoint()

_OVERWRITE = "__overwrite__"


def unwrapped(value: Any) -> tuple[bool, Any]:
    """Whether ``value`` is an ``Overwrite`` in one of its three forms, and what it carries."""
    if isinstance(value, Overwrite):
        return True, value.value
    if isinstance(value, Mapping):
        if len(value) == 1 and _OVERWRITE in value:
            return True, value[_OVERWRITE]
        # What orjson makes of the dataclass on its way through the LangGraph API server.
        if value.get("type") == _OVERWRITE and "value" in value:
            return True, value["value"]
    return False, value


def conflict(key: str, names: Sequence[str]) -> InvalidUpdateError:
    """LangGraph's own error for different values in one step, with the ways out of it."""
    return InvalidUpdateError(
        create_error_message(
            message=(
                f"At key '{key}': {len(names)} different values in one step: {' and '.join(names)}. Give each node its "
                "own key, keep them by branch name (Annotated[dict[str, KVHandle], KVBranches], one branch per node), "
                "join them (Annotated[KVHandle | KVComposite, KVCompose], each under a name of its own or under none), or let "
                "one node write Overwrite(handle)."
            ),
            error_code=ErrorCode.INVALID_CONCURRENT_GRAPH_UPDATE,
        )
    )
