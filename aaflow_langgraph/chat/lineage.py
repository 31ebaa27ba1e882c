"""Where a chat model finds and leaves the handle of the agent that calls it: the key ``kv_lineages`` of the graph's state.

Knows how LangGraph lets a running task read and write its state (as LangGraph's own ``push_message`` and ``ToolNode`` do); knows
no broker and no message. Outside of a graph, and in one whose state has no such key, nothing is found and nothing is left.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from langchain_core.runnables import RunnableConfig

from aaflow_langgraph.errors import MalformedHandle
from aaflow_langgraph.graph.lineages import LINEAGES, longest
from aaflow_langgraph.handle import MAX_LABEL_CHARS, KVHandle

_READ, _SEND = "__pregel_read", "__pregel_send"

Send = Callable[[list[tuple[str, Any]]], None]


class _Written(dict[str, KVHandle]):
    """What one task writes. A second answer of the task goes into it as well: two writes of one key would turn the task's
    entry in ``stream_mode="updates"`` into a list.
    """

    __slots__ = ("__weakref__", "read")

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.read = read

    def __reduce__(self) -> tuple[type, tuple[dict[str, KVHandle]]]:
        """Copies of it, by whoever streams it on, are plain dicts."""
        return dict, (dict(self),)


# By task, as long as LangGraph keeps the write: one that is retried has lost it, one that is resumed reads by another function.
_written: WeakValueDictionary[str, _Written] = WeakValueDictionary()
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Lineage:
    """One agent's place in the state.

    Attributes:
        name: Nodes around the agent, and the model's namespace.
        own: Ids of the agent's own handle, at most one.
        others: Ids of what other agents said with the same model, the longest first.
    """

    name: str
    own: tuple[str, ...]
    others: tuple[str, ...]
    _task: str
    _read: Any
    _send: Send | None

    @classmethod
    def of(cls, config: RunnableConfig, namespace: str) -> Lineage:
        """The lineage of the task that runs with ``config``, for a model of ``namespace``."""
        configurable = config.get("configurable") or {}
        path = str((config.get("metadata") or {}).get("langgraph_checkpoint_ns", ""))
        name = "/".join(part.split(":")[0] for part in path.split("|")) + f"@{namespace[:8]}"
        read = configurable.get(_READ)
        kept = _kept(read)
        if kept is None:
            return cls(name, (), (), "", None, None)
        handles = {key: handle for key, value in kept.items() if (handle := _handle(value, namespace)) is not None}
        ordered = sorted(handles, key=lambda key: (-handles[key].kv_tokens, key))
        others = dict.fromkeys(handles[key].kv_id for key in ordered if key != name)
        own = (handles[name].kv_id,) if name in handles else ()
        return cls(name, own, tuple(others), path, read, configurable.get(_SEND))

    def leave(self, handle: KVHandle) -> None:
        """Keep a handle as where this agent stands."""
        if self._send is None:
            return
        labelled = replace(handle, kv_label=self.name.rpartition("@")[0][-MAX_LABEL_CHARS:])
        with _lock:
            written = _written.get(self._task)
            if written is None or written.read is not self._read:
                written = _written[self._task] = _Written(self._read)
                self._send([(LINEAGES, written)])
            written[self.name] = longest(labelled, written.get(self.name, labelled))


def _kept(read: Any) -> Mapping[str, Any] | None:
    """What the state holds under the key; None when it has none."""
    if not callable(read):
        return None
    try:
        with _lock:  # reading goes over what the task wrote, which another thread of it may add to
            kept = read(LINEAGES, False)
    except KeyError:  # no such channel
        return None
    return kept if isinstance(kept, Mapping) else None


def _handle(value: Any, namespace: str) -> KVHandle | None:
    try:
        handle = KVHandle.coerce(value)
    except MalformedHandle:  # edited by hand
        return None
    return handle if handle.kv_namespace == namespace else None
