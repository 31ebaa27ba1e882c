"""The record of values that channels did not take: what is wrong with them, never what they say.

Knows handles and the log. Knows no channel and keeps no rejected value: it may be confidential text.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from aaflow_langgraph.composite import COMPOSITE_FIELDS, COMPOSITE_REQUIRED, KVComposite, is_composite_shaped
from aaflow_langgraph.errors import MalformedHandle
from aaflow_langgraph.handle import KVHandle

logger = logging.getLogger("aaflow_langgraph.graph")

MAX_REJECTED = 100
"""How many kinds of rejected writes a process remembers."""

_HANDLE_FIELDS = tuple(field.name for field in fields(KVHandle))
_REQUIRED_FIELDS = ("kv_id", "kv_namespace", "kv_tokens")
_NONE = "None"


@dataclass(frozen=True, slots=True)
class RejectedWrite:
    """A kind of value that a channel did not take.

    Attributes:
        key: State key as the channel knows it, with the branch behind a dot.
        reason: What is wrong with the value.
        kept: First digits of the id of the handle or composite that stayed, or ``""`` when there was none.
        count: How often this key got this kind of value. An upper bound: LangGraph applies one write again for every
            conditional edge behind the node and for every ``get_state`` of an interrupted step.
    """

    key: str
    reason: str
    kept: str
    count: int = 1


_rejected: OrderedDict[tuple[str, str], RejectedWrite] = OrderedDict()
_lock = threading.Lock()


def rejected_writes() -> tuple[RejectedWrite, ...]:
    """The kinds of values that channels of this process rejected most recently, newest last; at most 100."""
    with _lock:
        return tuple(_rejected.values())


def record(key: str, reason: str, *, kept: KVHandle | KVComposite | None = None) -> None:
    """Note a rejected write for ``rejected_writes`` and in the log."""
    kept_id = "" if kept is None else kept.kv_composite_id if isinstance(kept, KVComposite) else kept.kv_id
    short_id = kept_id[:12]
    with _lock:
        known = _rejected.pop((key, reason), None)
        count = 1 if known is None else known.count + 1
        _rejected[key, reason] = RejectedWrite(key, reason, short_id, count)
        if len(_rejected) > MAX_REJECTED:
            _rejected.popitem(last=False)
    # A dataclass state writes the None default of every handle field at every step: that is no news.
    level = logging.DEBUG if reason == _NONE else logging.WARNING
    logger.log(level, "state key %r keeps %s, the value written is not taken: %s", key, short_id or "nothing", reason)


def reason_for(value: Any, *, expected: str = "a handle", error: MalformedHandle | None = None) -> str:
    """What is wrong with ``value``, in words that quote nothing of it."""
    if value is None:
        return _NONE
    if error is None or not isinstance(value, Mapping):
        return f"{expected} was expected, got {type(value).__name__}"
    is_composite = is_composite_shaped(value)
    required, known = (COMPOSITE_REQUIRED, COMPOSITE_FIELDS) if is_composite else (_REQUIRED_FIELDS, _HANDLE_FIELDS)
    missing = [name for name in required if name not in value]
    num_unknown = sum(name not in known for name in value)
    if missing or num_unknown:
        kind = "composite" if is_composite else "handle"
        return f"a dict that is no {kind}: missing {', '.join(missing) or 'nothing'}, {num_unknown} unknown fields"
    # "kv_tokens must be an int in [1, ...), got ...": what follows quotes the value.
    return str(error).partition(", got ")[0]
