"""Composites: how handles are joined for a broker, and how what was joined is made again when its KV is gone.

Composes assembly, rotation and the ladder over sessions. Knows how KV of the children is reached, whatever tier it is in or
whether it must be computed again; what a request is, it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from aaflow_langgraph.compose.assemble import Assembly, Child, assemble
from aaflow_langgraph.compose.work import Work, move_in
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.engine.rotary import rotation_of
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import RecipeMissing
from aaflow_langgraph.model import Copied, Recipe
from aaflow_langgraph.recipes import RecipeBook
from aaflow_langgraph.session import Session

Whole = Callable[[Recipe], AbstractContextManager[Session]]
"""A session that stands behind the last token of a recipe."""


class Composer:
    """Thread-safe."""

    def __init__(self, engine: TransformersEngine, recipes: RecipeBook) -> None:
        self._engine = engine
        self._recipes = recipes

    def assemble(self, children: Sequence[Recipe]) -> Assembly:
        """The tokens of a composite.

        Raises:
            NotComposable: See ``assemble``.
        """
        found = [
            Child(self._recipes.parents(recipe), self._recipes.sequence(recipe.kv_id).token_ids) for recipe in children
        ]
        return assemble(self._engine.frame, found)

    def fill(
        self,
        session: Session,
        token_ids: Sequence[int],
        copied: Sequence[Copied],
        whole: Whole,
        climb: Callable[[Work], None],
    ) -> None:
        """Put the KV of a composite behind a session's position: moved from where it was computed, then as ``climb`` has it.

        Raises:
            NotComposable: The model's keys cannot be moved; says which layer and why. Way out: fail.
            RecipeMissing: A child is known nowhere. Way out: fail.
        """
        start = session.position
        rotation = rotation_of(self._engine)
        rotation.check_span(len(token_ids))
        origins = [origin for one in copied for origin in self._origins(one)]
        children = {one.kv_id: self._recipes.find(one.kv_id) for one in origins}

        def write(mixed: Mixed) -> None:
            ends = [start, *(end for one in origins for end in (one.at, one.at + one.stop - one.start)), len(token_ids)]
            for stop, at in zip(ends[::2], ends[1::2], strict=True):
                mixed.rows[..., stop - mixed.start : at - mixed.start, :] = (
                    0  # not every kernel passes over rows of NaN
                )
            with ExitStack() as stack:
                sessions = {
                    kv_id: stack.enter_context(whole(recipe))
                    for kv_id, recipe in children.items()
                    if recipe is not None
                }
                segments = move_in(rotation, origins, {kv_id: one.pieces for kv_id, one in sessions.items()}, mixed)
                for one in sessions.values():
                    one.verify()
            climb(Work(self._engine, token_ids, mixed, start, segments, tick=session.tick))

        missing = [kv_id for kv_id, recipe in children.items() if recipe is None]
        if missing:
            raise RecipeMissing(
                f"segment {missing[0][:12]} of a composite is known nowhere any more, so its KV cannot be moved; compose again "
                "from handles that are known, or with exact=True"
            )
        session.fill(len(token_ids), write)

    def _origins(self, one: Copied) -> list[Copied]:
        """Where the KV of a span was computed: keys are rotated from there, never from where they were moved to."""
        found: list[Copied] = []
        recipe = self._recipes.find(one.kv_id)
        for step in self._recipes.parents(recipe) if recipe is not None else ():
            a, b = max(step.start, one.start), min(step.stop, one.stop)
            if a >= b:
                continue
            at = a
            for inner in step.composition.copied if step.composition else ():
                start, stop = max(inner.at, a), min(inner.at + inner.stop - inner.start, b)
                if start >= stop:
                    continue
                if at < start:
                    found.append(Copied(one.kv_id, at, start, one.at + at - one.start))
                shift = inner.start - inner.at
                found += self._origins(Copied(inner.kv_id, start + shift, stop + shift, one.at + start - one.start))
                at = stop
            if at < b:
                found.append(Copied(one.kv_id, at, b, one.at + at - one.start))
        return _merged(found) if found else [one]


def _merged(found: Sequence[Copied]) -> list[Copied]:
    """Neighbours that come from one place as one."""
    merged: list[Copied] = []
    for one in found:
        last = merged[-1] if merged else None
        if last and (last.kv_id, last.stop, last.at + last.stop - last.start) == (one.kv_id, one.start, one.at):
            merged[-1] = Copied(last.kv_id, last.start, one.stop, last.at)
        else:
            merged.append(one)
    return merged
