"""``PrefixBreak``: one place where the prompts of an app are not append-only. JSON in, JSON out; looks at nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from aaflow_langgraph.explain.report import Cause, Difference


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """What is not append-only at one node, or on the edge to it.

    Attributes:
        source: The node whose handle could have been continued: with ``node`` the edge. Empty when it is none's.
        node: The node that asks.
        cause: One of the causes of ``explain_miss``.
        why: In one sentence, without quoting anything.
        mend: What to change.
        num_lost: Tokens that would be prefilled again, each time; an estimate.
        num_context: Tokens of the prompt.
        seen: ``"run"``: within one run of two turns. ``"start"``: between two starts of the app.
        difference: Where the prompts part.
    """

    source: str
    node: str
    cause: Cause
    why: str
    mend: str
    num_lost: int
    num_context: int
    seen: str
    difference: Difference | None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON; ``from_dict`` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> PrefixBreak:
        """The finding that ``to_dict`` wrote."""
        difference = document["difference"]
        return cls(**{**document, "difference": None if difference is None else Difference(**difference)})


def worst(found: Iterable[PrefixBreak]) -> tuple[PrefixBreak, ...]:
    """One finding for each node and cause, the costliest; in the order in which they were found first."""
    kept: dict[tuple[str, str], PrefixBreak] = {}
    for one in found:
        key = (one.node, one.cause)
        if key not in kept or one.num_lost > kept[key].num_lost:
            kept[key] = one
    return tuple(kept.values())
