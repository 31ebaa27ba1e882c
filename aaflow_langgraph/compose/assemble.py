"""What the tokens of a composite are, and from which child each of them comes.

The first child stands as it is. Of every other child stands what it does not share with the rest: what is behind their
common ancestor, or, where they have none, behind the beginning that the chat template gives to all of them. Open turns of
one role flow into one; whole turns keep the template's frame around them, and what the frame needs between them is new.

Knows recipes, turns and a chat frame; knows no KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aaflow_langgraph.engine.turns import ChatFrame, common_prefix
from aaflow_langgraph.errors import NotComposable
from aaflow_langgraph.model import Copied, Recipe, Span, Turn


@dataclass(frozen=True, slots=True)
class Child:
    """A handle to be joined: the recipes whose tokens begin its own, root first, itself last; and all of its tokens."""

    line: tuple[Recipe, ...]
    token_ids: tuple[int, ...]

    @property
    def recipe(self) -> Recipe:
        """Its own recipe."""
        return self.line[-1]


@dataclass(frozen=True, slots=True)
class Assembly:
    """The first child, and what follows it.

    Attributes:
        first: What the composite begins with, whole.
        token_ids: All tokens of the composite.
        turns: All of its turns.
        copied: Which of the tokens behind the first child are in which other child, in order. What lies between is new.
    """

    first: Child
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    copied: tuple[Copied, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A turn of a child as far as it is its own."""

    child: Child
    turn: Turn
    start: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.child.token_ids[self.start : self.turn.content.stop]


def assemble(frame: ChatFrame, children: Sequence[Child]) -> Assembly:
    """Put children together, in their order. One that another begins with adds nothing, and is left out.

    Raises:
        NotComposable: There are none, or the chat template rewrites the first one's turns. Way out: fail.
        ConfigError: The template refuses the roles in this order. Way out: fail.
    """
    if not children:
        raise NotComposable("there is nothing to compose: no segment was given; pass at least one handle")
    inner = {recipe.kv_id for child in children for recipe in child.line[:-1]}
    first, *rest = [child for child in children if child.recipe.kv_id not in inner]
    if not rest:
        return Assembly(first, first.token_ids, first.recipe.turns, ())
    shared = _num_shared([first, *rest])
    # Behind a common beginning there is no second one; else every child but the first loses its own.
    starts = [shared or int(child.token_ids[:1] == (frame.bos_id,)) for child in rest]
    parts = [_parts(child, start) for child, start in zip(rest, starts, strict=True)]
    if first.recipe.turns[-1].role and all(part.turn.role for own in parts for part in own):
        return _framed(frame, first, [part for own in parts for part in own], shared)
    return _chained(first, rest, starts)


def _num_shared(children: Sequence[Child]) -> int:
    """How many leading tokens all children have from a common ancestor or from the template's beginning."""
    common = set.intersection(*({recipe.kv_id for recipe in child.line[:-1]} for child in children))
    if common:
        # Every line holds the common ones in the same order.
        return max(recipe.stop for recipe in children[0].line if recipe.kv_id in common)
    length = min(common_prefix(children[0].token_ids, child.token_ids) for child in children)
    starts = [{turn.content.start for turn in child.recipe.turns if turn.content.start <= length} for child in children]
    return max(set.intersection(*starts), default=0)


def _parts(child: Child, start: int) -> list[_Part]:
    return [
        _Part(child, turn, max(turn.content.start, start)) for turn in child.recipe.turns if turn.content.stop > start
    ]


def _framed(frame: ChatFrame, first: Child, parts: Sequence[_Part], shared: int) -> Assembly:
    """Turns of a chat, with the template's frame."""
    whole, starts = frame.join(
        first.token_ids, first.recipe.turns, [(part.turn.role, part.token_ids, part.turn.open) for part in parts]
    )
    num_first = len(first.token_ids)
    if whole.num_shared < num_first:
        raise NotComposable(
            f"the chat template rewrites the first segment's turns from token {whole.num_shared} of {num_first} on when others "
            "follow it; compose raw segments (raw=True), or use an append-only template"
        )
    ids, end = whole.token_ids, num_first
    copied: list[Copied] = []
    for number, (part, at) in enumerate(zip(parts, starts, strict=True)):
        if at < 0:
            continue
        start, stop, own = part.start, part.turn.content.stop, part.child.token_ids
        length = stop - start
        bound = min((other for other in starts[number + 1 :] if other >= 0), default=len(ids))
        # The frame around a content is the same in the child where its neighbours have the same roles.
        while start > shared and at > end and own[start - 1] == ids[at - 1]:
            start, at, length = start - 1, at - 1, length + 1
        while stop < len(own) and at + length < bound and own[stop] == ids[at + length]:
            stop, length = stop + 1, length + 1
        end = at + length
        copied.append(Copied(part.child.recipe.kv_id, start, stop, at))
    return Assembly(first, ids, whole.turns, tuple(copied))


def _chained(first: Child, rest: Sequence[Child], starts: Sequence[int]) -> Assembly:
    """Tokens one behind the other, as they are."""
    ids = first.token_ids
    turns = [Turn(turn.role, turn.content, False) for turn in first.recipe.turns]
    copied = []
    for child, start in zip(rest, starts, strict=True):
        move = len(ids) - start
        copied.append(Copied(child.recipe.kv_id, start, len(child.token_ids), len(ids)))
        for turn in child.recipe.turns:
            if turn.content.stop > start:
                span = Span(max(turn.content.start, start) + move, turn.content.stop + move)
                turns.append(Turn(turn.role, span, False))
        ids += child.token_ids[start:]
    turns[-1] = Turn(turns[-1].role, turns[-1].content, rest[-1].recipe.turns[-1].open)
    return Assembly(first, ids, tuple(turns), tuple(copied))
