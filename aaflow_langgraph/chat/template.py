"""One model's chat template: the text of a conversation, and where in it the contents stand.

The template is rendered twice: with the contents, which is the truth, and with marks in their place, which shows the frame
around them. Where both do not fit together the places are unknown, and only the text counts.

Knows message dicts and texts; knows no token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.chat.spoken import Spoken
from aaflow_langgraph.chat.tools import ToolFormat, recognise
from aaflow_langgraph.engine.turns import JOINT
from aaflow_langgraph.errors import ConfigError

_MARK = "aaflowmark{}x7e3"


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
class _Frames:
    """What a template writes before, between and after contents, and whose these are, in the order of the rendering."""

    texts: list[str]
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Place:
    """Characters of a content in a rendering."""

    part: Part
    start: int
    stop: int


class Template:
    """Renders conversations to text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
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

    def accepted(self, parts: Sequence[Part], tools: list[dict[str, Any]] | None) -> tuple[list[Part], str]:
        """The parts as the template takes them, and its rendering: with the model's own words for its tool calls where it
        renders those the same way, and neighbours of one role merged where it insists on alternation.

        Raises:
            ConfigError: It refuses these roles, or leaves a message out. Way out: fail.
        """
        error: ConfigError | None = None
        for candidate in (list(parts), _merged(parts)):
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

    def places(self, parts: list[Part], tools: list[dict[str, Any]] | None, text: str) -> list[Place]:
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

    def end_of_turn(self, parts: list[Part], tools: list[dict[str, Any]] | None) -> str:
        """What is written behind an answer to these messages; empty when they can have none."""
        mark = _MARK.format("end")
        try:
            text = self._write([*_messages(parts), {"role": "assistant", "content": mark}], tools, False)
        except ConfigError:
            return ""
        _before, found, end = text.rpartition(mark)
        return end if found else ""

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


def _scan(text: str, frames: _Frames) -> list[Place] | None:
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
        places.append(Place(part, at, stop))
        at = stop + len(frame)
    return places if at == len(text) else None
