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

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.chat.tools import ToolFormat, recognise
from aaflow_langgraph.engine.turns import JOINT, ChatFrame
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.model import Recipe, Span, Turn

_KEPT = 64
"""So many spelled conversations are kept ready."""

_MARK = "aaflowmark{}x7e3"


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


@dataclass(frozen=True, slots=True)
class Part:
    """One message on its way into a prompt.

    Attributes:
        message: As the template reads it.
        spoken: The conversation that ended in it, when the model said it and that is known.
        words: All that the model said there, tool calls included, when the message has tool calls and nobody edited it.
    """

    message: dict[str, Any]
    spoken: Spoken | None = None
    words: str | None = None


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


@dataclass(frozen=True, slots=True)
class _Frames:
    """What a template writes before, between and after contents, and whose these are, in the order of the rendering."""

    texts: list[str]
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class _Place:
    """Characters of a content in a rendering."""

    part: Part
    start: int
    stop: int


class Renderer:
    """Renders conversations through one tokenizer's chat template. Thread-safe."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, frame: ChatFrame) -> None:
        self._tokenizer = tokenizer
        self._frame = frame
        self._lock = threading.Lock()
        self._spelled: OrderedDict[tuple[str, int], str] = OrderedDict()
        self._format: ToolFormat | ConfigError | None = None

    def tool_format(self) -> ToolFormat:
        """How this model's template writes tool calls; found out once.

        Raises:
            ConfigError: It writes none, or in a way not known here. Way out: fail.
        """
        if self._format is None:
            try:
                self._format = recognise(self._write)
            except ConfigError as error:
                self._format = error
        if isinstance(self._format, ConfigError):
            raise ConfigError(*self._format.args)
        return self._format

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
        parts, text = self._accepted(list(parts), tools)
        places = self._places(parts, tools, text)
        spoken = [part.spoken for part in reversed(parts) if part.spoken is not None]
        base, base_text, base_turns = self._longest([*hints, *spoken], text)
        ids, turns = self._assemble(text, places, base, len(base_text), base_turns)
        if self._frame.spell(ids) != text:
            ids, turns = self._literally(text, base, len(base_text), ids, turns)
        ids += self._frame.encode(opening) if opening else ()
        return Prompt(text + opening, ids, turns, self._end_of_turn(parts, tools))

    # ---------------------------------------------------------------- text

    def _accepted(self, parts: list[Part], tools: list[dict[str, Any]] | None) -> tuple[list[Part], str]:
        """The parts as the template takes them, and its rendering: with the model's own words for its tool calls where it
        renders those the same way, and neighbours of one role merged where it insists on alternation.
        """
        error: ConfigError | None = None
        for candidate in (parts, _merged(parts)):
            try:
                plain = self._write(_messages(candidate), tools, True)
            except ConfigError as refused:
                error = error or refused
                continue
            own = [replace(part, message=_in_own_words(part)) for part in candidate]
            if own == candidate:
                return candidate, plain
            worded = self._in_own_words(candidate, own, tools, plain)
            return (candidate, plain) if worded is None else (own, worded)
        assert error is not None
        raise error

    def _in_own_words(
        self, parts: list[Part], own: list[Part], tools: list[dict[str, Any]] | None, plain: str
    ) -> str | None:
        """The rendering with the model's own words, if it differs from the plain one in those words only."""
        try:
            text = self._write(_messages(own), tools, True)
        except ConfigError:
            return None
        frames = self._frames(own, tools)
        worded = None if frames is None else _scan(text, frames)
        written = None if frames is None else _scan(plain, frames)
        if worded is None or written is None:
            return None
        for said, place in zip(worded, written, strict=True):
            own_text, plain_text = text[said.start : said.stop], plain[place.start : place.stop]
            if said.part.words is None and own_text != plain_text:
                return None
            if said.part.words is not None and not _keeps_the_end(own_text, said.part.words):
                return None
        return text

    def _places(self, parts: list[Part], tools: list[dict[str, Any]] | None, text: str) -> list[_Place]:
        """Where the contents are in ``text``; none when the frame around them depends on them."""
        frames = self._frames(parts, tools)
        return [] if frames is None else _scan(text, frames) or []

    def _frames(self, parts: list[Part], tools: list[dict[str, Any]] | None) -> _Frames | None:
        """The template around marks in place of the contents; None when it does not take them.

        Raises:
            ConfigError: The template leaves a message out. Way out: fail.
        """
        marks = {_MARK.format(number): part for number, part in enumerate(parts) if part.message["content"]}
        marked = [
            {**part.message, "content": _MARK.format(number)} if part.message["content"] else part.message
            for number, part in enumerate(parts)
        ]
        try:
            rest = self._write(marked, tools, True)
        except ConfigError:
            return None
        for mark, part in marks.items():
            role = part.message["role"]
            # What a model said beside a tool call is left out by some; nobody else's words may be.
            if mark not in rest and role != "assistant":
                raise ConfigError(
                    f"the chat template leaves out what a {role!r} message says; use a role it renders, or put the text into a "
                    "user message"
                )
        found = sorted((rest.index(mark), mark) for mark in marks if mark in rest)
        texts = []
        for _at, mark in found:
            before, _mark, rest = rest.partition(mark)
            texts.append(before)
        return _Frames([*texts, rest], [marks[mark] for _at, mark in found])

    def _end_of_turn(self, parts: list[Part], tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
        """What the template writes behind an answer to these messages."""
        mark = _MARK.format("end")
        try:
            text = self._write([*_messages(parts), {"role": "assistant", "content": mark}], tools, False)
        except ConfigError:
            return ()
        _before, found, end = text.rpartition(mark)
        return self._frame.encode(end) if found and end else ()

    def _write(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, generate: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=generate
            )
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            roles = [message["role"] for message in messages]
            shown = ", ".join(roles if len(roles) <= 8 else [*roles[:4], "...", *roles[-3:]])
            raise ConfigError(f"the chat template refuses the roles {shown}: {error}") from error
        return str(text)

    # ---------------------------------------------------------------- ids

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
        self, text: str, places: Sequence[_Place], base: tuple[int, ...], at: int, base_turns: tuple[Turn, ...]
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

    def _own_ids(self, place: _Place, content: str) -> tuple[int, ...]:
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


def _messages(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [part.message for part in parts]


def _in_own_words(part: Part) -> dict[str, Any]:
    if part.words is None:
        return part.message
    return {**{key: value for key, value in part.message.items() if key != "tool_calls"}, "content": part.words}


def _keeps_the_end(written: str, words: str) -> bool:
    """Are these the words, but for reasoning that the template left out in front of them?"""
    end = written.strip()
    return written == words or (bool(end) and words.rstrip().endswith(end))


def _merged(parts: Sequence[Part]) -> list[Part]:
    """Neighbours of one role as one message, for templates that insist on alternation."""
    merged: list[Part] = []
    for part in parts:
        before = merged[-1].message if merged else {"role": ""}
        if before["role"] != part.message["role"] or before["role"] == "tool" or "tool_calls" in before:
            merged.append(part)
            continue
        texts = [text for text in (before["content"], part.message["content"]) if text]
        merged[-1] = Part({**before, **part.message, "content": JOINT.join(texts)})
    return merged


def _scan(text: str, frames: _Frames) -> list[_Place] | None:
    """Where contents stand between frames in ``text``, found in one pass; None when they do not all stand there.

    The content itself is looked for first, because it may hold what looks like a frame; where the template changed it, it ends
    where the next frame begins.
    """
    first, *others = frames.texts
    if not text.startswith(first):
        return None
    places = []
    at = len(first)
    for number, (part, frame) in enumerate(zip(frames.parts, others, strict=True), start=1):
        content = part.message["content"]
        is_last = number == len(others)
        if text.startswith(content + frame, at) and (not is_last or at + len(content + frame) == len(text)):
            stop = at + len(content)
        elif is_last:
            stop = len(text) - len(frame)
            if stop < at or not text.endswith(frame):
                return None
        else:
            stop = text.find(frame, at) if frame else -1
            if stop < 0:
                return None
        places.append(_Place(part, at, stop))
        at = stop + len(frame)
    return places if at == len(text) else None
