"""What a chat model said before: the token ids of a conversation that ended in an answer.

Knows recipes; knows no text.
"""

from __future__ import annotations

from dataclasses import dataclass

from aaflow_langgraph.model import Recipe, Span, Turn


@dataclass(frozen=True, slots=True)
class Spoken:
    """A conversation that ended in an answer: its ids, and where that answer's are."""

    kv_id: str
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]

    @classmethod
    def of(cls, recipe: Recipe, token_ids: tuple[int, ...]) -> Spoken:
        """From a recipe and all its ids."""
        return cls(recipe.kv_id, token_ids, recipe.turns)

    @property
    def answer(self) -> Span:
        """Where the last turn's content lies."""
        return self.turns[-1].content if self.turns else Span(0, len(self.token_ids))

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Ids of the last turn's content."""
        return self.token_ids[self.answer.start : self.answer.stop]
