"""What the inspector is shown: the same values whether a broker is in this process or is looked at from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

from aaflow_langgraph.errors import RecipeMissing
from aaflow_langgraph.graph.rejected import RejectedWrite
from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.journal import Entry
from aaflow_langgraph.model import Recipe
from aaflow_langgraph.movements import Movement


@dataclass(frozen=True, slots=True)
class Facts:
    """One moment.

    Attributes:
        recipes: By ``kv_id``, in the order in which they became known.
        extents: Those that an index knows, and those that only a disk has.
        entries: Requests, oldest first; none from outside, where nobody counts them.
        movements: Evictions, spills, fetches, adoptions, oldest first; none from outside.
        owner: The pool of this process; None from outside.
        token_bytes: What one token takes; 0 where that is not known.
        threads: Threads in whose checkpoints a handle is, by its id, where that is known.
    """

    recipes: Mapping[str, Recipe]
    extents: tuple[ExtentRecord, ...]
    entries: tuple[Entry, ...] = ()
    movements: tuple[Movement, ...] = ()
    owner: str | None = None
    token_bytes: int = 0
    threads: Mapping[str, Set[str]] = field(default_factory=dict)


def tokens_along(recipes: Mapping[str, Recipe], kv_id: str) -> tuple[int, ...]:
    """All tokens of a handle, put together along its parents.

    Raises:
        RecipeMissing: One of them is not there. Way out: fail.
    """
    parts: list[tuple[int, ...]] = []
    at: str | None = kv_id
    while at is not None:
        recipe = recipes.get(at)
        if recipe is None or len(parts) > len(recipes):
            raise RecipeMissing(f"the tokens of handle {kv_id[:12]} are not known: recipe {at[:12]} is not there")
        parts.append(recipe.token_ids)
        at = recipe.parent
    return tuple(token for part in reversed(parts) for token in part)


class Source(Protocol):
    """Where facts come from. Every method may block and may be called from any thread."""

    def facts(self) -> Facts:
        """What is there now.

        Raises:
            ConfigError, IndexUnavailable: It cannot be looked at (any more); what is said is for people.
        """

    def overview(self) -> dict[str, Any]:
        """Who this is, in which state, and its counters. Never raises for what went away: it says so."""

    def names_of(self, recipe: Recipe) -> Sequence[str]:
        """By which names the extents are known that a recipe adds to its parent."""

    def decode(self, token_ids: Sequence[int]) -> str | None:
        """Their text; None where there is no tokenizer."""

    def spell(self, token_ids: Sequence[int]) -> str | None:
        """Their text with that of special tokens; None where there is no tokenizer."""

    def rejected(self) -> Sequence[RejectedWrite]:
        """Kinds of values that channels of this process did not take, oldest first."""

    def why_missed(self, number: int, *, with_text: bool) -> dict[str, Any] | None:
        """Why a request reused less than it could have; None when that request is not known. Without ``with_text`` neither
        text nor token ids are in it.
        """
