"""Replies of the index's scripts, read as what they must be. They are untrusted: anything else is an ``IntegrityError``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from aaflow_langgraph.errors import IntegrityError
from aaflow_langgraph.index import _wire as wire


def spans(lines: Sequence[Any]) -> tuple[list[tuple[int, int, int]], list[tuple[int, bytes]]]:
    """(extent, start, stop) and (extent, state) of every line of a match."""
    found, states = [], []
    for line in lines:
        raw_id, start, stop, state = fields(line, 4)
        extent_id = wire.from_id(raw_id)
        found.append((extent_id, count(start), count(stop)))
        states.append((extent_id, state))
    return found, states


def lines(reply: Any) -> list[tuple[int, bytes]]:
    """(extent, rest) of every line."""
    return [(wire.from_id(raw_id), rest) for raw_id, rest in (fields(line, 2) for line in items(reply))]


def states(reply: Any) -> list[tuple[int, bytes]]:
    """(extent, state) of every line, without what was counted of its uses."""
    return [(extent_id, rest.rsplit(b" ", 3)[0]) for extent_id, rest in lines(reply)]


def fields(line: Any, number: int) -> list[bytes]:
    """``number`` fields of a line; the last one takes the rest."""
    found = line.split(b" ", number - 1) if isinstance(line, bytes) else []
    if len(found) != number:
        raise IntegrityError("the index answered with a line that is not ours")
    return found


def items(reply: Any, length: int | None = None) -> list[Any]:
    """A list, of that length if one is given."""
    if not isinstance(reply, list) or (length is not None and len(reply) != length):
        raise IntegrityError("the index answered in a form that is not ours")
    return reply


def count(value: Any) -> int:
    """A number that is not negative and fits 64 bits."""
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, bytes) and value.isdigit() and len(value) < 20:
        return int(value)
    raise IntegrityError("the index answered with something else than a count")


def flag(value: Any) -> bool:
    """Yes or no."""
    if value not in (0, 1):
        raise IntegrityError("the index answered with something else than yes or no")
    return bool(value)


def seconds(value: Any) -> float:
    """A time."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise IntegrityError("the index answered with something else than a time")
    return found


def text(value: Any) -> bytes:
    """Text as it came."""
    if not isinstance(value, bytes):
        raise IntegrityError("the index answered with something else than text")
    return value
