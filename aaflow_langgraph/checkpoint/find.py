"""Handles wherever state may hold them. Knows Python containers and LangGraph's carriers by their shape; knows no saver.

A composite counts as its children: whoever reads it later needs their recipes and their KV.

Looks into mappings (keys, too), lists, tuples (named ones, ``DeltaChannel`` snapshots), sets, deques, dataclasses
(``Interrupt``, ``Command``, ``Overwrite``), pydantic models (LangChain's messages) and ``Send``. Does not look into other
objects: no serialiser of LangGraph stores them, unless it pickles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from langgraph.types import Send

from aaflow_langgraph.composite import KVComposite, is_composite_shaped
from aaflow_langgraph.errors import MalformedHandle
from aaflow_langgraph.handle import KVHandle

_LEAVES = frozenset({str, int, float, bool, bytes, complex, type(None)})
_SHAPE = ("kv_id", "kv_namespace", "kv_tokens")
_FIELDS = tuple(field.name for field in fields(KVHandle))


def find_handles(value: Any) -> tuple[KVHandle, ...]:
    """Every different handle in ``value``, in the order of their ids; dicts that name a handle, or have a composite's shape,
    count as such.

    Walks without recursion and meets each object once, so depth and cycles do not matter; time is linear in the size.
    """
    found: dict[KVHandle, None] = {}
    seen: dict[int, Any] = {}  # keeps what it met alive: an id names an object only as long as it lives
    todo = [value]
    while todo:
        item = todo.pop()
        if type(item) in _LEAVES or id(item) in seen:
            continue
        if isinstance(item, KVHandle):
            found[item] = None
            continue
        seen[id(item)] = item
        if isinstance(item, (KVComposite, Mapping)) and (handles := _coerced(item)):
            found.update(dict.fromkeys(handles))
        else:
            todo.extend(part for part in _parts(item) if type(part) not in _LEAVES)
    return tuple(sorted(found, key=lambda handle: handle.kv_id))


def _coerced(item: KVComposite | Mapping[Any, Any]) -> tuple[KVHandle, ...]:
    """The handles that a composite joins, or the one that a plain dict was; none when it was neither."""
    try:
        if isinstance(item, KVComposite) or is_composite_shaped(item):
            return KVComposite.coerce(item).kv_children
        if not all(name in item for name in _SHAPE):
            return ()
        # More may stand beside a handle's fields: a chat model's answer says what it cost, too.
        return (KVHandle(**{name: item[name] for name in _FIELDS if name in item}),)
    except MalformedHandle:
        return ()


def _parts(item: Any) -> Iterable[Any]:
    """What an object consists of."""
    if isinstance(item, Mapping):
        return (*item.keys(), *item.values())
    if isinstance(item, (list, tuple, set, frozenset, deque)):
        return item
    if isinstance(item, Send):
        return (item.arg,)
    if hasattr(type(item), "model_dump") or "__fields__" in vars(
        type(item)
    ):  # pydantic, as LangGraph knows it; and version 1
        return (*vars(item).values(), getattr(item, "__pydantic_extra__", None))
    if is_dataclass(item) and not isinstance(item, type):
        return _field_values(item)
    return ()


def _field_values(item: Any) -> Iterator[Any]:
    for field in fields(item):
        if hasattr(item, field.name):  # a slot may never have been filled
            yield getattr(item, field.name)
