"""Why a prompt leaves the tokens of another one: text and token ids in, a cause out.

Knows two token sequences, their chat turns and how ids become text. Knows no broker and no journal. All of it is a guess
from what stands at the first difference; the rules go from the surest to the least sure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aaflow_langgraph.engine.turns import common_prefix
from aaflow_langgraph.explain.report import Cause
from aaflow_langgraph.model import Turn

Decode = Callable[[Sequence[int]], str]

_BACK_TOKENS = 96
_AHEAD_TOKENS = 1024
_SHOWN_CHARS = 60
_SAME_CONTENT_TOKENS = 64
"""So many equal tokens behind two system prompts are worth having one; fewer than these are nobody's loss."""

_THINK = re.compile(r"<(?:think|thinking|thought|reasoning|analysis|scratchpad)>|\[THINK\]|<\|channel\|?>\s*analysis")
_THINK_END = re.compile(r"</(?:think|thinking|thought|reasoning|analysis|scratchpad)>|\[/THINK\]")
_TOOL_WORD = re.compile(r'"(?:parameters|function|description)"|\btools?\b|\bfunctions?\b', re.IGNORECASE)
_TOOLS_BEGIN = re.compile(r'<tools>|\[AVAILABLE_TOOLS\]|<\|?tool|"type":\s*"function"', re.IGNORECASE)
_TOOLS_END = re.compile(r"</tools>|\[/AVAILABLE_TOOLS\]", re.IGNORECASE)
_HEADER = re.compile(r"(?:<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>)\s*(\w+)")

_NAMES = (
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*",
    r"(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?",
)
_VOLATILE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("a UUID", re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b", re.IGNORECASE)),
    (
        "a date or time",
        re.compile(
            r"\b\d{4}-\d{2}-\d{2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?)?|\b\d{1,2}:\d{2}(?::\d{2}(?:\.\d+)?)?\b"
            r"|\b\d{1,2}[./]\d{1,2}[./]\d{2,4}\b"
            rf"|\b(?:{_NAMES[1]},?\s+)?(?:{_NAMES[0]}\.?\s+\d{{1,2}}|\d{{1,2}}\.?\s+{_NAMES[0]})\b(?:,?\s+\d{{4}})?"
            rf"|\b{_NAMES[1]}\b",
            re.IGNORECASE,
        ),
    ),
    ("a long number", re.compile(r"\b\d{6,}(?:\.\d+)?\b")),
    ("a hexadecimal id", re.compile(r"\b(?=[0-9a-f]*\d)[0-9a-f]{8,}\b", re.IGNORECASE)),
    (
        "a counter",
        re.compile(
            r"(?:\b(?:id|no|nr|number|step|turn|request|session|run|round|count(?:er)?|seq|version|attempt)\b\.?|#)"
            r"\s*[:=#]?\s*\d+",
            re.IGNORECASE,
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and what is known of their chat turns."""

    token_ids: tuple[int, ...]
    turns: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where ``asked`` leaves ``known``, and why.

    Attributes:
        position: First differing token.
        asked_id: The prompt's token there.
        known_id: The other one's.
        role: Chat role of the turn it is in, or ``""``.
        is_last_turn: Is it in the last turn of the prompt, which nobody expects to be known?
        cause: ``"none"`` where the prompt just says something new there.
        what: What differs, without quoting it: ``"a date or time"``.
        before: Equal text in front.
        asked: How the prompt goes on.
        known: How the other one goes on.
    """

    position: int
    asked_id: int
    known_id: int
    role: str
    is_last_turn: bool
    cause: Cause
    what: str
    before: str
    asked: str
    known: str


def divergence(asked: Prompt, known: Prompt, decode: Decode, *, same_asker: bool) -> Divergence | None:
    """Where and why ``asked`` leaves ``known``; None when one of them is a prefix of the other.

    Args:
        asked: A prompt.
        known: Tokens of a handle.
        decode: Token ids to text, special tokens included.
        same_asker: Did the same node make both? Then another system prompt or tool list is a change and not another agent.
    """
    at = common_prefix(asked.token_ids, known.token_ids)
    if at in (len(asked.token_ids), len(known.token_ids)):
        return None
    back = max(0, at - _BACK_TOKENS)
    head = decode(asked.token_ids[back:at])
    a = decode(asked.token_ids[back : at + _AHEAD_TOKENS])
    k = decode(known.token_ids[back : at + _AHEAD_TOKENS])
    char = _common_chars(a, k)
    role, is_last = _turn_at(asked, at, decode)
    cause, what = _cause(asked, known, at, decode, head, a, k, role, is_last, same_asker)
    start = min(char, len(head))
    start = max(start - _SHOWN_CHARS // 2, *(a.rfind(space, 0, start) + 1 for space in " \n"))  # whole words
    return Divergence(
        position=at,
        asked_id=asked.token_ids[at],
        known_id=known.token_ids[at],
        role=role,
        is_last_turn=is_last,
        cause=cause,
        what=what,
        before=a[max(0, start - _SHOWN_CHARS) : start],
        asked=a[start : start + _SHOWN_CHARS],
        known=k[start : start + _SHOWN_CHARS],
    )


def covers_earlier_turns(prompt: Prompt, num_shared: int, decode: Decode) -> bool:
    """Are the first ``num_shared`` tokens all that comes before the last turn?"""
    turns = [turn for turn in prompt.turns if turn.content.start < len(prompt.token_ids)]
    if turns:
        return len(turns) == 1 or turns[-2].content.stop <= num_shared
    return len([role for role in _HEADER.findall(decode(prompt.token_ids[num_shared:])) if not _answers(role)]) == 1


def _cause(
    asked: Prompt,
    known: Prompt,
    at: int,
    decode: Decode,
    head: str,
    a: str,
    k: str,
    role: str,
    is_last: bool,
    same_asker: bool,
) -> tuple[Cause, str]:
    char = _common_chars(a, k)
    if _is_retokenised(asked, known, at, decode, len(head), char):
        return "retokenised", "the same text as other token ids"
    if _is_think(a, k, char):
        return "think", "a block of reasoning"
    tools = _tools(asked, known, at, decode)
    if tools == "order":
        return "tools", "the same tools in another order"
    kind = _volatile(a, k, char)
    if kind:
        return "volatile", kind
    if tools and same_asker:
        return "tools", "another list of tools"
    if _is_in_front(asked, at, role) and _is_in_front(known, at, role):
        if same_asker or _goes_on_alike(asked, known, at, decode):
            return "system", "the system prompt"
    elif same_asker and not is_last:
        return "history", f"an earlier {role or 'chat'} turn"
    return "none", "new text"


def _is_retokenised(asked: Prompt, known: Prompt, at: int, decode: Decode, head: int, char: int) -> bool:
    """Do both sides say the same at their first differing tokens? Text shared to the end of both tokens says so."""
    back = max(0, at - _BACK_TOKENS)
    ends = [len(decode(one.token_ids[back : at + 1])) for one in (asked, known)]
    return head < min(ends) and max(ends) <= char


def _is_think(a: str, k: str, char: int) -> bool:
    """Does one side have a block of reasoning here that the other one lacks, or has emptied?"""

    def state(text: str) -> str:
        near = max(0, char - 24)
        opened = _THINK.search(text, near, char + 24)
        if opened is None or opened.start() > char + 2:
            return "absent"
        inside = text[opened.end() :]
        closed = _THINK_END.match(inside.lstrip())
        return "empty" if closed else "full"

    return state(a) != state(k)


def _tools(asked: Prompt, known: Prompt, at: int, decode: Decode) -> str:
    """``"order"``: the same tools differently ordered; ``"list"``: inside a list of tools; else ``""``."""
    start, stop = _piece(asked, at)
    known_start, known_stop = _piece(known, at)
    if start != known_start:
        return ""
    ours, theirs = decode(asked.token_ids[start:stop]), decode(known.token_ids[known_start:known_stop])
    if not _TOOL_WORD.search(ours):
        return ""
    words = [Counter(re.findall(r"\w+", text)) for text in (ours, theirs)]
    if words[0] == words[1] and ours != theirs and len(words[0]) > 1:
        return "order"
    before = decode(asked.token_ids[start:at])
    begun = list(_TOOLS_BEGIN.finditer(before))
    return "list" if begun and not _TOOLS_END.search(before, begun[-1].end()) else ""


def _volatile(a: str, k: str, char: int) -> str:
    """What kind of date, time or id stands at the first difference on both sides; empty when none does."""
    for kind, pattern in _VOLATILE:
        around = [
            any(m.start() <= char <= m.end() for m in pattern.finditer(text, max(0, char - 80), char + 80))
            for text in (a, k)
        ]
        if all(around):
            return kind
    return ""


def _turn_at(prompt: Prompt, at: int, decode: Decode) -> tuple[str, bool]:
    """Role of the turn that a position is in, and whether it is the prompt's last."""
    turns = [turn for turn in prompt.turns if turn.content.start < len(prompt.token_ids)]
    if turns:
        number = next((n for n, turn in enumerate(turns) if at < turn.content.stop), len(turns) - 1)
        return turns[number].role, number == len(turns) - 1
    headers = _HEADER.findall(decode(prompt.token_ids[max(0, at - _AHEAD_TOKENS) : at]))
    # Behind it come the rest of its own turn and, as a rule, the header of the answer.
    behind = _HEADER.findall(decode(prompt.token_ids[at : at + 4 * _AHEAD_TOKENS]))
    return (headers[-1] if headers else ""), all(map(_answers, behind))


def _answers(role: str) -> bool:
    """Is it the model's own role?"""
    return role in ("assistant", "model")


def _piece(prompt: Prompt, at: int) -> tuple[int, int]:
    """The stretch around a position that is one content, or what stands between two contents."""
    start, most = 0, min(len(prompt.token_ids), at + _AHEAD_TOKENS)
    for turn in prompt.turns:
        if at < turn.content.start:
            return start, min(turn.content.start, most)
        if at < turn.content.stop:
            return turn.content.start, min(turn.content.stop, most)
        start = turn.content.stop
    return max(start, at - _AHEAD_TOKENS), most


def _is_in_front(prompt: Prompt, at: int, role: str) -> bool:
    """Is a position in the system prompt, or in what the template puts before the first other turn?"""
    if not prompt.turns:
        return role == "system"
    other = next((turn for turn in prompt.turns if turn.role != "system"), None)
    if prompt.turns[0].role != "system":
        return role == "system"
    return other is None or at < other.content.start


def _goes_on_alike(asked: Prompt, known: Prompt, at: int, decode: Decode) -> bool:
    """Do two prompts say the same behind the turn that differs?"""
    nexts: list[tuple[int, ...]] = []
    for prompt in (asked, known):
        turn = next((turn for turn in prompt.turns if turn.content.start > at), None)
        if turn is not None:
            nexts.append(prompt.token_ids[turn.content.start :])
    if len(nexts) == 2:
        return common_prefix(nexts[0], nexts[1]) >= _SAME_CONTENT_TOKENS
    texts = []
    for prompt in (asked, known):
        behind = decode(prompt.token_ids[at : at + 4 * _AHEAD_TOKENS])
        header = _HEADER.search(behind)
        texts.append(behind[header.end() :] if header else "")
    return _common_chars(*texts) >= 4 * _SAME_CONTENT_TOKENS


def _common_chars(a: str, b: str) -> int:
    """Leading characters in common."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
