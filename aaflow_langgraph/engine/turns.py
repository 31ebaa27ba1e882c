"""Chat turns as token ids: how a conversation grows without ever decoding and re-encoding what is already there.

A chat template is rendered with marks in place of the contents; what stands between the marks is the *frame*. Frames are
encoded once each, contents keep the ids they have, and the rendering with the real contents is compared with the
assembled text: a template that rewrites earlier turns (drops reasoning, trims) is seen, and the caller reuses the longest
common token prefix instead of the whole handle.

    ids = frame_0 + content_0 + frame_1 + content_1 + ... + frame_n

Knows a tokenizer; knows no model, no KV, no broker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.model import Span, Turn

JOINT = "\n\n"
"""Stands between an open turn and the text that continues it."""

_SHORT = 4096
"""Pieces of at most so many characters are likely to be frames: their ids are kept ready."""


@dataclass(frozen=True, slots=True)
class Extension:
    """A conversation with one more text: all its token ids and turns, and how many leading ids were there before."""

    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...]
    num_shared: int


class ChatFrame:
    """Renders turns through one tokenizer's own chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        # SentencePiece tokenizers put a space mark before the first word of every call; behind an anchor they do not.
        pieces = tokenizer.convert_ids_to_tokens(tokenizer.encode("x", add_special_tokens=False))
        self._anchor = "\n" if pieces and str(pieces[0]).startswith("▁") else ""
        self._decode = lru_cache(maxsize=256)(self._decode_uncached)
        self._encode_frame = lru_cache(maxsize=256)(self._encode)
        self._frames = lru_cache(maxsize=256)(self._frames_uncached)

    @property
    def bos_id(self) -> int | None:
        """What the tokenizer puts at the beginning of every text of its own accord, or None."""
        first = self._tokenizer.encode("x", add_special_tokens=True)[:1]
        return first[0] if first and first[0] == self._tokenizer.bos_token_id else None

    @property
    def has_template(self) -> bool:
        """Does the tokenizer come with a chat template?"""
        return bool(self._tokenizer.chat_template)

    def encode_text(self, text: str, *, what: str, at_start: bool = False, joint: str = "") -> tuple[int, ...]:
        """Token ids of a content, behind ``joint``; at the very start of a raw sequence with the tokenizer's own BOS.

        Raises:
            ConfigError: The text is not text, is empty, is not valid Unicode, or holds special tokens only. Way out: fail.
        """
        checked = check_text(text, what)
        ids = self._encode(joint + checked)
        lead = self._encode_frame(joint) if joint else ()
        own = ids[len(lead) :] if ids[: len(lead)] == lead else ids
        if all(token_id in self._special for token_id in own):
            raise ConfigError(
                f"{what} is {checked[:40]!r}: it encodes to special tokens only ({len(own)} of them) and holds nothing to "
                "read; pass text"
            )
        if at_start:
            with_bos = tuple(self._tokenizer.encode(checked, add_special_tokens=True))
            return with_bos if with_bos[-len(ids) :] == ids else ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a piece of rendered text, special tokens by their text, as it reads behind other text."""
        return self._encode_frame(text) if len(text) <= _SHORT else self._encode(text)

    def spell(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens and all."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def extend(
        self,
        prior_ids: tuple[int, ...],
        turns: tuple[Turn, ...],
        role: str,
        text: str,
        *,
        what: str,
        raw: bool,
        generate: bool,
    ) -> Extension:
        """Add ``text`` to a conversation: continue its open turn of the same role, or start a new one.

        ``generate`` closes the turn and opens the assistant's; otherwise the turn stays open. ``raw`` adds the ids of the
        text and nothing else.

        Raises:
            ConfigError: No chat template, a role the template refuses, bad text, or a template that rewrites contents in a
                way that cannot be followed. Way out: fail.
        """
        if raw:
            ids = self.encode_text(text, what=what, at_start=not prior_ids)
            span = Span(len(prior_ids), len(prior_ids) + len(ids))
            closed = tuple(Turn(t.role, t.content, False) for t in turns)
            return Extension(prior_ids + ids, (*closed, Turn("", span, False)), len(prior_ids))
        check_text(role, "role")
        if not self.has_template:
            raise ConfigError(
                "the tokenizer has no chat template, so a prompt has no turns: pass raw=True for plain continuation, or set "
                "tokenizer.chat_template"
            )
        lead, chat = self._behind_foreign_frame(prior_ids, *_split_raw(prior_ids, turns))
        contents: list[tuple[str, tuple[int, ...]]] = [
            (turn.role, prior_ids[turn.content.start : turn.content.stop]) for turn in chat
        ]
        if chat and chat[-1].open and chat[-1].role == role:
            joined = self.encode_text(text, what=what, joint=JOINT)
            contents[-1] = (role, contents[-1][1] + joined)
        else:
            contents.append((role, self.encode_text(text, what=what)))
        return self._assemble(lead, contents, prior_ids, generate=generate)

    def join(
        self, prior_ids: tuple[int, ...], turns: tuple[Turn, ...], added: Sequence[tuple[str, tuple[int, ...], bool]]
    ) -> tuple[Extension, tuple[int, ...]]:
        """Add contents ``(role, token ids, stays open)`` to a conversation as they are; also where each of them begins.

        One whose role is that of the open turn before it flows into that turn; every other one starts a turn. Of one that
        the template rewrites the beginning is -1.

        Raises:
            ConfigError: A role the template refuses, or a template that cannot be followed. Way out: fail.
        """
        lead, chat = _split_raw(prior_ids, turns)
        contents = [(turn.role, prior_ids[turn.content.start : turn.content.stop]) for turn in chat]
        open_role = chat[-1].role if chat and chat[-1].open else None
        places: list[tuple[int, int]] = []
        for role, ids, stays_open in added:
            if role == open_role:
                places.append((len(contents) - 1, len(contents[-1][1])))
                contents[-1] = (role, contents[-1][1] + ids)
            else:
                places.append((len(contents), 0))
                contents.append((role, ids))
            open_role = role if stays_open else None
        whole = self._assemble(lead, contents, prior_ids, generate=False)
        made = whole.turns[len(whole.turns) - len(contents) :]
        kept = [len(turn.content) == len(ids) for turn, (_, ids) in zip(made, contents, strict=True)]
        starts = tuple(made[turn].content.start + at if kept[turn] else -1 for turn, at in places)
        if open_role is None:
            closed = (*whole.turns[:-1], Turn(made[-1].role, made[-1].content, False))
            ids = whole.token_ids + self.end_of_turn(whole.token_ids, closed)
            whole = Extension(ids, closed, whole.num_shared)
        return whole, starts

    def end_of_turn(self, ids: tuple[int, ...], turns: tuple[Turn, ...]) -> tuple[int, ...]:
        """The template's own ids after the last turn's content; empty for raw turns."""
        _lead, chat = _split_raw(ids, turns)
        if not chat or turns[-1].role == "":
            return ()
        frames = self._frames(tuple(turn.role for turn in chat), generate=False)
        return self._encode_frame(frames[-1])

    def split_at(self, token_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Ids whose text is exactly ``text``, a prefix of what ``token_ids`` say: whole tokens kept, the rest encoded."""
        kept = len(token_ids)
        while kept and not text.startswith(self.decode(token_ids[:kept])):
            kept -= 1
        rest = text[len(self.decode(token_ids[:kept])) :]
        return tuple(token_ids[:kept]) + (self._encode(rest) if rest else ())

    def _behind_foreign_frame(
        self, prior_ids: tuple[int, ...], lead: tuple[int, ...], chat: tuple[Turn, ...]
    ) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
        """The same, or all of it as the lead when its frame is not this template's alone (a chat model showed tools there):
        rendered anew, it would lose them.
        """
        if not chat or chat[-1].open:
            return lead, chat
        first = self._encode_frame(self._frames(tuple(turn.role for turn in chat), generate=False)[0])
        if lead and first[:1] == (self._tokenizer.bos_token_id,):
            first = first[1:]
        is_own = prior_ids[len(lead) : chat[0].content.start] == first
        return (lead, chat) if is_own else (prior_ids, ())

    def _assemble(
        self,
        lead: tuple[int, ...],
        contents: list[tuple[str, tuple[int, ...]]],
        prior_ids: tuple[int, ...],
        *,
        generate: bool,
    ) -> Extension:
        roles = tuple(role for role, _ in contents)
        frames = self._frames(roles, generate=generate)
        texts = [self._decode(ids) for _, ids in contents]
        expected = "".join(part for pair in zip(frames, [*texts, ""], strict=True) for part in pair)
        rendered = self._render([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)], generate)
        if rendered != expected:
            contents = self._follow(frames, contents, texts, rendered)
        # A raw lead has its own beginning of sequence; a second one in the middle would be a false sink.
        first = self._encode_frame(frames[0])
        if lead and first[:1] == (self._tokenizer.bos_token_id,):
            first = first[1:]
        ids, turns = list(lead + first), []
        for (role, content), frame in zip(contents, frames[1:], strict=True):
            start = len(ids)
            ids += content
            turns.append(Turn(role, Span(start, len(ids)), False))
            ids += self._encode_frame(frame)
        if not generate:
            # The turn stays open: its end belongs to whoever continues or closes it.
            turns[-1] = Turn(turns[-1].role, turns[-1].content, True)
            del ids[turns[-1].content.stop :]
        if lead:
            turns.insert(0, Turn("", Span(0, len(lead)), False))
        target = tuple(ids)
        return Extension(target, tuple(turns), common_prefix(prior_ids, target))

    def _follow(
        self,
        frames: tuple[str, ...],
        contents: list[tuple[str, tuple[int, ...]]],
        texts: list[str],
        rendered: str,
    ) -> list[tuple[str, tuple[int, ...]]]:
        """Contents as the template rewrote them; ids are kept wherever the text is."""
        pattern = re.escape(frames[0]) + "".join(f"(.*?){re.escape(frame)}" for frame in frames[1:])
        found = re.fullmatch(pattern, rendered, re.DOTALL)
        if found is None:
            raise ConfigError(
                "the chat template rewrites earlier turns in a way that cannot be followed (its frame around them changes "
                "with their content); pass raw=True and frame the prompt yourself, or use an append-only template"
            )
        return [
            (role, ids if new == old else self._encode(new))
            for (role, ids), old, new in zip(contents, texts, found.groups(), strict=True)
        ]

    def _frames_uncached(self, roles: tuple[str, ...], *, generate: bool) -> tuple[str, ...]:
        """What the template puts before, between and after contents of these roles."""
        marks = [f"aaflowmark{number}x7e3" for number in range(len(roles))]
        rest = self._render([{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)], generate)
        frames = []
        for role, mark in zip(roles, marks, strict=True):
            before, found, rest = rest.partition(mark)
            if not found:
                raise ConfigError(f"the chat template drops the content of a {role!r} turn; use a role it renders")
            frames.append(before)
        return (*frames, rest)

    def _render(self, messages: list[dict[str, str]], generate: bool) -> str:
        try:
            rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate)
        except (TemplateError, KeyError, TypeError, ValueError) as error:
            roles = [message["role"] for message in messages]
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error
        return str(rendered)

    def _encode(self, text: str) -> tuple[int, ...]:
        if not self._anchor:
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        anchor = self._tokenizer.encode(self._anchor, add_special_tokens=False)
        ids = self._tokenizer.encode(self._anchor + text, add_special_tokens=False)
        if ids[: len(anchor)] == anchor:
            return tuple(ids[len(anchor) :])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode_uncached(self, token_ids: tuple[int, ...]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def check_text(text: object, what: str) -> str:
    """``text`` itself when it is non-empty, valid Unicode text.

    Raises:
        ConfigError: Says what is wrong and where. Way out: fail.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{what} is not UTF-8: byte {text[error.start]:#04x} at offset {error.start}; decode it with the right codec"
            ) from error
    if not isinstance(text, str):
        raise ConfigError(f"{what} must be text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{what} is not valid Unicode: lone surrogate {text[error.start]!a} at character {error.start}; read the source "
            "with errors='replace' or the right codec"
        ) from error
    if not text.strip():
        raise ConfigError(f"{what} is empty ({len(text)} characters of white space); pass text")
    return text


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """Length of the longest common prefix of two texts or lists of token ids."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    low, high = 0, size  # a[:low] == b[:low], a[:high] != b[:high]
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _split_raw(ids: tuple[int, ...], turns: tuple[Turn, ...]) -> tuple[tuple[int, ...], tuple[Turn, ...]]:
    """Leading ids outside any frame, and the chat turns behind them. Raw text between chat turns ends the frame."""
    last_raw = max((number for number, turn in enumerate(turns) if turn.role == ""), default=-1)
    if last_raw < 0:
        return ((), turns) if turns else (ids, ())
    return ids[: turns[last_raw].content.stop], turns[last_raw + 1 :]
