"""The part of a recipe that says how it was composed, as plain lists, and back. Knows the form; knows no files and no index."""

from __future__ import annotations

from typing import Any

from aaflow_langgraph.composite import RUNGS
from aaflow_langgraph.errors import IntegrityError
from aaflow_langgraph.handle import DIGEST_PATTERN
from aaflow_langgraph.model import Composition, Copied

_MAX_REPORT_CHARS = 16_384


def composition_fields(made: Composition) -> list[Any]:
    """A composition as JSON has it."""
    copied = [[one.kv_id, one.start, one.stop, one.at] for one in made.copied]
    return [made.composite_id, list(made.children), list(made.labels), copied, made.rung, made.k, made.r, made.report]


def read_composition(stored: Any) -> Composition:
    """A composition from what ``composition_fields`` made; nothing is checked but its form."""
    composite_id, children, labels, copied, rung, k, r, report = stored
    return Composition(
        composite_id, tuple(children), tuple(labels), tuple(Copied(*one) for one in copied), rung, k, r, report
    )


def composition_from(stored: Any, start: int, stop: int) -> Composition:
    """A composition of the tokens ``[start, stop)`` from what is not trusted.

    Raises:
        ValueError, TypeError, IntegrityError: It is none.
    """
    made = read_composition(stored)
    names = (made.composite_id, *made.children, *(one.kv_id for one in made.copied))
    numbers = (made.k, *(number for one in made.copied for number in (one.start, one.stop, one.at)))
    ends = [start, *(end for one in made.copied for end in (one.at, one.at + one.stop - one.start)), stop]
    if not all(isinstance(name, str) and DIGEST_PATTERN.fullmatch(name) for name in names):
        raise IntegrityError("ids are 64 lower-case hex digits each")
    if not all(type(number) is int and number >= 0 for number in numbers) or ends != sorted(ends):
        raise IntegrityError("a composition copies spans of its own tokens, one behind the other")
    if not {one.kv_id for one in made.copied} <= set(made.children) or len(made.labels) != len(made.children):
        raise IntegrityError("a composition copies from its children, and each has a label")
    if not all(isinstance(text, str) for text in (made.rung, made.report, *made.labels)) or made.rung not in RUNGS:
        raise IntegrityError("a composition is made by a rung of the ladder, and says how it went")
    if type(made.r) is not float or not 0 <= made.r <= 1 or len(made.report) > _MAX_REPORT_CHARS:
        raise IntegrityError("a share is between 0 and 1, and a report is short")
    return made
