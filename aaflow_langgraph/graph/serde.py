"""Lets handles and composites through LangGraph's serialisers.

Knows the allow-list of ``JsonPlusSerializer``; knows no checkpointer and no broker. How handles come back from a saver, and
composites alike:

    default       ``KVHandle``, with one line in LangGraph's log per process
    allow-list    ``KVHandle``, given ``MSGPACK_ALLOWLIST`` or ``handle_serializer()``
    strict        ``KVHandle`` where the graph was compiled with that saver and has a channel of this package
                  (LangGraph allows the types of its channels); else a plain dict, which channels and nodes turn back

``LANGGRAPH_STRICT_MSGPACK`` is read when LangGraph is imported, so set it before.
"""

from __future__ import annotations

from collections.abc import Iterable

from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.handle import KVHandle

MSGPACK_ALLOWLIST: tuple[tuple[str, str], ...] = tuple(
    (value.__module__, value.__qualname__) for value in (KVHandle, KVComposite)
)
"""For ``JsonPlusSerializer(allowed_msgpack_modules=...)`` and for a saver's ``with_allowlist``."""


def handle_serializer(*extra: type | tuple[str, ...]) -> JsonPlusSerializer:
    """A serializer for savers that allows handles, composites, LangGraph's own safe types and ``extra``, and nothing else.

    Args:
        extra: The application's own state types, as classes or ``(module, name)``; those left out come back as dicts.

    Examples:
        ``SqliteSaver(connection, serde=handle_serializer(MyState))``
    """
    allowed: Iterable[type | tuple[str, ...]] = (*MSGPACK_ALLOWLIST, *extra)
    return JsonPlusSerializer(allowed_msgpack_modules=allowed)
