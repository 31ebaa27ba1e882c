"""A conversation as token ids that extend what was computed before, wherever the template allows.

The template's own rendering of the whole conversation is the truth about the text. Its token ids are put together:

    | what a model said and read before, as ids | content | frame | content | ... | frame that opens the answer |

The first part is the longest of the conversations behind the messages' own handles whose text the rendering begins with: it
is taken as it is, never encoded again. What follows is cut at the borders of contents and each piece is encoded by itself,
so that equal pieces have equal ids in every agent's prompt; an answer of another branch keeps the ids it was made of.
A template that rewrites earlier turns (drops reasoning, trims) only makes the first part shorter.

    spell(ids) == text, or what the tokenizer itself makes of the text

Knows a tokenizer and message dicts; knows no broker. What was said before is given with the messages.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.chat.spoken import Spoken
from aaflow_langgraph.chat.template import Part, Place, Template
from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.model import Span, Turn

_KEPT = 64
"""So many spelled conversations are kept ready."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        text: As the template wrote it.
        token_ids: Its ids.
        turns: Where the contents are.
        end_of_turn: Ids that close the answer in this template.
    """

    text: str
    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    end_of_turn: tuple[int, ...]


class Renderer:
    """Renders conversations through one tokenizer's chat template. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, frame: ChatFrame) -> None:
        self.template = Template(tokenizer)
        self._frame = frame
        self._lock = threading.Lock()
        self._spelled: OrderedDict[tuple[str, int], str] = OrderedDict()

    def render(
        self,
        parts: Sequence[Part],
        *,
        tools: list[dict[str, Any]] | None = None,
        opening: str = "",
        hints: Sequence[Spoken] = (),
    ) -> Prompt:
        """The prompt that asks for the next answer.

        Args:
            parts: The conversation.
            tools: What the template shows as tools.
            opening: Text with which the answer begins already.
            hints: More conversations that this one may begin with.

        Raises:
            ConfigError: No messages, no template, or one that refuses these roles. Way out: fail.
        """
        if not parts:
            raise ConfigError("there is nothing to answer: pass at least one message")
        if not self._frame.has_template:
            raise ConfigError(
                "the tokenizer has no chat template, so messages cannot be rendered: set tokenizer.chat_template, or use "
                "broker.generate(..., raw=True)"
            )
        parts, text = self.template.accepted(parts, tools)
        places = self.template.places(parts, tools, text)
        spoken = [part.spoken for part in reversed(parts) if part.spoken is not None]
        base, base_text, base_turns = self._longest([*hints, *spoken], text)
        ids, turns = self._assemble(text, places, base, len(base_text), base_turns)
        if self._frame.spell(ids) != text:
            ids, turns = self._literally(text, base, len(base_text), ids, turns)
        ids += self._frame.encode(opening) if opening else ()
        end = self.template.end_of_turn(parts, tools)
        return Prompt(text + opening, ids, turns, self._frame.encode(end) if end else ())

    def _longest(self, known: Sequence[Spoken], text: str) -> tuple[tuple[int, ...], str, tuple[Turn, ...]]:
        """Ids, text and turns of the longest conversation that ``text`` begins with: whole, up to its answer's end, or up to
        where that begins.
        """
        best: tuple[tuple[int, ...], str, tuple[Turn, ...]] = ((), "", ())
        for spoken in known:
            stops = sorted({len(spoken.token_ids), spoken.answer.stop, spoken.answer.start}, reverse=True)
            for stop in stops:
                if stop <= len(best[0]):
                    break
                spelled = self._spell(spoken, stop)
                if text.startswith(spelled):
                    turns = tuple(turn for turn in spoken.turns if turn.content.stop <= stop)
                    best = spoken.token_ids[:stop], spelled, turns
                    break
        return best

    def _assemble(
        self, text: str, places: Sequence[Place], base: tuple[int, ...], at: int, base_turns: tuple[Turn, ...]
    ) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
        """``base``, which spells ``text[:at]``, and the rest piece by piece."""
        ids = list(base)
        turns = list(base_turns)
        for place in places:
            if place.stop <= at:
                continue
            if place.start > at:
                ids += self._frame.encode(text[at : place.start])
                at = place.start
            content = text[at : place.stop]
            start = len(ids)
            ids += self._own_ids(place, content) or self._frame.encode(content)
            role = str(place.part.message["role"])
            if at > place.start and turns and turns[-1].role == role:
                start = turns.pop().content.start  # the base ended inside this content
            turns.append(Turn(role, Span(start, len(ids)), False))
            at = place.stop
        if at < len(text):
            ids += self._frame.encode(text[at:])
        return tuple(ids), tuple(replace(turn, open=False) for turn in turns)

    def _own_ids(self, place: Place, content: str) -> tuple[int, ...]:
        """The ids that an answer was made of, when it still says the same."""
        spoken = place.part.spoken
        if spoken is None or self._frame.spell(spoken.answer_ids) != content:
            return ()
        return spoken.answer_ids

    def _literally(
        self, text: str, base: tuple[int, ...], at: int, ids: tuple[int, ...], turns: tuple[Turn, ...]
    ) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
        """Ids of ``text`` where pieces do not add up to it: at least what the tokenizer itself makes of it."""
        whole = self._frame.encode(text)
        as_read = self._frame.spell(whole)
        if self._frame.spell(ids) == as_read:
            return ids, turns
        if base and self._frame.spell(rest := base + self._frame.encode(text[at:])) == text:
            return rest, (Turn("", Span(0, len(rest)), False),)
        return whole, (Turn("", Span(0, len(whole)), False),)

    def _spell(self, spoken: Spoken, stop: int) -> str:
        """Text of the first ``stop`` ids of a conversation."""
        key = (spoken.kv_id, stop)
        with self._lock:
            kept = self._spelled.get(key)
            if kept is not None:
                self._spelled.move_to_end(key)
                return kept
        spelled = self._frame.spell(spoken.token_ids[:stop])
        with self._lock:
            self._spelled[key] = spelled
            while len(self._spelled) > _KEPT:
                self._spelled.popitem(last=False)
        return spelled
