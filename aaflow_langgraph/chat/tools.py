r"""How models write tool calls, read and begun.

    Hermes, Qwen      <tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>, as many as wanted, behind the content
    Llama 3           {"name": ..., "parameters": {...}}; the whole answer, or none of it
    Mistral           [TOOL_CALLS] [{"name": ..., "arguments": {...}}], or [TOOL_CALLS]name[ARGS]{...}

Which of them a model uses is found by having its own template write a call and reading that back. Knows texts; knows no
messages and no tokens. A call that cannot be read is kept as it was said, with the reason: the model may be told.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from aaflow_langgraph.engine.turns import common_prefix
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.handle import is_unicode

Render = Callable[[list[dict[str, Any]], "list[dict[str, Any]] | None", bool], str]
"""A template: messages, tools, whether to open the assistant's turn."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool, as the model wrote it."""

    name: str
    args: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """What looks like a call and cannot be read; ``name`` is empty when not even that can.

    ``text`` begins with the mark of its format, so that no lenient JSON parser makes half of a call of it.
    """

    name: str
    text: str
    error: str


@dataclass(frozen=True, slots=True)
class Said:
    """An answer taken apart."""

    content: str
    calls: tuple[Call, ...] = ()
    broken: tuple[BrokenCall, ...] = ()


class ToolFormat(ABC):
    """One way to write tool calls.

    Attributes:
        name: For people.
        tokens: Texts of special tokens that belong to a call; others are left out of what is read.
    """

    name: ClassVar[str]
    tokens: ClassVar[frozenset[str]]

    @abstractmethod
    def read(self, text: str) -> Said:
        """Content and calls of a whole answer."""

    @abstractmethod
    def num_shown(self, text: str) -> int:
        """How many leading characters of an answer that still grows are content for sure."""

    @abstractmethod
    def opening(self, tool: str | None) -> str:
        """How an answer begins that calls ``tool``, or any."""


class HermesFormat(ToolFormat):
    """Calls in tags, behind the content."""

    name = "Hermes"
    tokens = frozenset({"<tool_call>", "</tool_call>"})

    def read(self, text: str) -> Said:
        """See ``ToolFormat``."""
        content, *bodies = text.split("<tool_call>")
        return _collect("<tool_call>", content, (body.split("</tool_call>")[0] for body in bodies))

    def num_shown(self, text: str) -> int:
        """See ``ToolFormat``."""
        return _before(text, "<tool_call>")

    def opening(self, tool: str | None) -> str:
        """See ``ToolFormat``."""
        return '<tool_call>\n{"name":' + ("" if tool is None else f' {json.dumps(tool)}, "arguments":')


class MistralFormat(ToolFormat):
    """Calls behind one special token: a JSON list, or each with its name before its arguments."""

    name = "Mistral"
    tokens = frozenset({"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"})
    _NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[\]]*)?(?:\[ARGS\])?\s*(?=\{)")

    def __init__(self, *, named: bool) -> None:
        self._named = named

    def read(self, text: str) -> Said:
        """See ``ToolFormat``."""
        content, *bodies = text.split("[TOOL_CALLS]")
        return _collect("[TOOL_CALLS]", content, (call for body in bodies for call in self._calls(body)))

    def num_shown(self, text: str) -> int:
        """See ``ToolFormat``."""
        return _before(text, "[TOOL_CALLS]")

    def opening(self, tool: str | None) -> str:
        """See ``ToolFormat``."""
        if self._named:
            return "[TOOL_CALLS]" + ("" if tool is None else f"{tool}[ARGS]")
        return '[TOOL_CALLS] [{"name":' + ("" if tool is None else f' {json.dumps(tool)}, "arguments":')

    def _calls(self, body: str) -> Iterator[str]:
        if named := self._NAMED.match(body):
            arguments, _rest = _first_json(body[named.end() :])
            yield f'{{"name": {json.dumps(named[1])}, "arguments": {arguments}}}'
            return
        listed, _rest = _first_json(body)
        try:
            calls = _loads(listed)
        except ValueError:
            yield body
            return
        for call in calls if isinstance(calls, list) else [calls]:
            yield json.dumps(call, ensure_ascii=False)


class LlamaFormat(ToolFormat):
    """The whole answer is a JSON object with a name and parameters; several stand behind semicolons."""

    name = "Llama 3"
    tokens = frozenset({"<|python_tag|>"})
    _LOOKS = re.compile(r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:')

    def read(self, text: str) -> Said:
        """See ``ToolFormat``."""
        rest = text.strip().removeprefix("<|python_tag|>").lstrip()
        if not self._LOOKS.match(rest):
            return Said(text)
        bodies = []
        while rest.startswith("{"):
            body, rest = _first_json(rest)
            bodies.append(body)
            rest = rest.lstrip(" ;\n")
        return _collect("<|python_tag|>", "", bodies)

    def num_shown(self, text: str) -> int:
        """See ``ToolFormat``."""
        start = text.lstrip()
        is_open = start.startswith(("{", "<|python_tag|>")) or "<|python_tag|>".startswith(start)
        return 0 if is_open else len(text)

    def opening(self, tool: str | None) -> str:
        """See ``ToolFormat``."""
        return '{"name":' + ("" if tool is None else f' {json.dumps(tool)}, "parameters":')


_FORMATS = (HermesFormat(), MistralFormat(named=False), MistralFormat(named=True), LlamaFormat())
_PROBE = "aaflow_probe_tool"
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": _PROBE,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


def recognise(render: Render) -> ToolFormat:
    """The format in which a model's template writes tool calls.

    Raises:
        ConfigError: The template knows no tools, or writes calls in a way that is not known here. Way out: fail.
    """
    user = {"role": "user", "content": "Look it up."}
    arguments = {"word": "probe"}
    call = {"type": "function", "id": "aaflow000", "function": {"name": _PROBE, "arguments": arguments}}
    try:
        asked = render([user], [_PROBE_TOOL], True)
    except ConfigError as error:
        raise ConfigError(f"this model's chat template takes no tools: {error}") from error
    if _PROBE not in asked:
        raise ConfigError(
            "this model's chat template knows no tools: bound ones would never be shown to it. Use a model whose template "
            "renders tools (Qwen2.5, Qwen3, Hermes, Llama 3.1, Mistral v0.3 and later), or set tokenizer.chat_template"
        )
    reply = {"role": "tool", "name": _PROBE, "content": "found", "tool_call_id": "aaflow000"}
    try:
        replied = render(
            [user, {"role": "assistant", "content": "", "tool_calls": [call]}, reply], [_PROBE_TOOL], False
        )
    except ConfigError:
        replied = asked
    written = replied[common_prefix(asked, replied) :]
    for known in _FORMATS:
        if Call(_PROBE, arguments) in known.read(written).calls:
            return _FORMATS[2] if isinstance(known, MistralFormat) and "[ARGS]" in written else known
    # A template that shows tools and does not write calls back: what it tells the model to write.
    for known, mark in ((_FORMATS[0], "<tool_call>"), (_FORMATS[1], "[TOOL_CALLS]")):
        if mark in asked and _PROBE not in written:
            return known
    raise ConfigError(
        "this model's chat template writes tool calls in a way that is not known here "
        f"(known: {', '.join(sorted({known.name for known in _FORMATS}))}); it wrote {written[:80]!r}"
    )


def check_choice(choice: object, tools: Sequence[dict[str, Any]]) -> str | bool | None:
    """A tool choice in any of LangChain's spellings: None (free), True (some tool), False (no tool), or a tool's name.

    Raises:
        ConfigError: It names no bound tool, or is no choice at all. Way out: fail.
    """
    names = [str(tool["function"]["name"]) for tool in tools]
    if choice in (None, "auto", False):
        return None
    if choice == "none":
        return False
    if choice in (True, "any", "required"):
        return names[0] if len(names) == 1 else True
    if isinstance(choice, dict):
        function = choice.get("function")
        choice = function.get("name") if isinstance(function, dict) else choice.get("name")
    if choice not in names:
        raise ConfigError(
            f"tool_choice must be 'auto', 'none', 'any' or the name of a bound tool ({', '.join(names) or 'none is bound'}), "
            f"got {choice!r:.80}"
        )
    return str(choice)


def _collect(mark: str, content: str, bodies: Iterable[str]) -> Said:
    calls: list[Call] = []
    broken: list[BrokenCall] = []
    for body in bodies:
        try:
            calls.append(_call(body))
        except ValueError as error:
            name = re.search(r'"name"\s*:\s*"([^"\\]+)"', body)
            broken.append(BrokenCall(name[1] if name else "", mark + body, str(error)))
    return Said(content, tuple(calls), tuple(broken))


def _call(body: str) -> Call:
    said = _loads(body)
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or not said["name"]:
        raise ValueError("a tool call is a JSON object with a name and arguments")
    args = said.get("arguments", said.get("parameters", {}))
    if isinstance(args, str):
        args = _loads(args)
    if not isinstance(args, dict):
        raise ValueError(f"the arguments of {said['name']!r} are no JSON object")
    if not is_unicode(json.dumps(said, ensure_ascii=False)):
        raise ValueError("a tool call holds a lone surrogate")
    return Call(said["name"], args)


def _loads(text: str) -> Any:
    """JSON with raw line breaks in strings, as models write it.

    Raises:
        ValueError: It is none, or nested beyond reason.
    """
    try:
        return json.loads(text.strip(), strict=False, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("a tool call is nested too deeply") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _first_json(text: str) -> tuple[str, str]:
    """The first JSON value of a text and what is behind it; all of the text when it is none."""
    start = len(text) - len(text.lstrip())
    try:
        _value, stop = json.JSONDecoder(strict=False).raw_decode(text, start)
    except (ValueError, RecursionError):
        return text, ""
    return text[start:stop], text[stop:]


def _before(text: str, mark: str) -> int:
    """Characters before ``mark`` or what may be its beginning."""
    found = text.find(mark)
    if found >= 0:
        return found
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return len(text) - size
    return len(text)
