"""Tool calls are read as models write them, and what cannot be read is kept with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.utils.json import parse_partial_json

from aaflow_langgraph.chat.template import Template
from aaflow_langgraph.chat.tools import (
    Call,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    Said,
    ToolFormat,
    check_choice,
)
from aaflow_langgraph.errors import ConfigError
from tests import templates, tiny

HERMES, LLAMA, MISTRAL, NAMED = HermesFormat(), LlamaFormat(), MistralFormat(named=False), MistralFormat(named=True)
ADD = Call("add", {"a": 1, "b": 2})
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "find")]


def loaded(template: str | None) -> Template:
    tokenizer = tiny.tokenizer(template)
    tokenizer.bos_token = "<|endoftext|>"
    return Template(tokenizer)


@pytest.mark.parametrize(
    ("tools", "text", "said"),
    [
        (HERMES, "Just text.", Said("Just text.")),
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', Said("", (ADD,))),
        (HERMES, 'Sure.\n<tool_call>{"name":"add","arguments":{"a":1,"b":2}}', Said("Sure.\n", (ADD,))),
        (HERMES, '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', Said("", (ADD,))),
        (HERMES, '<tool_call>{"name": "f"}</tool_call> <tool_call>{"name": "f", "arguments": {"x": "a\nb"}}</tool_call>',
         Said("", (Call("f", {}), Call("f", {"x": "a\nb"})))),
        (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}', Said("", (ADD,))),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}', Said("", (ADD,))),
        (LLAMA, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
         Said("", (Call("f", {}), Call("g", {})))),
        (LLAMA, '{"answer": 42}', Said('{"answer": 42}')),
        (LLAMA, 'It is {"name": "add"}', Said('It is {"name": "add"}')),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]', Said("", (ADD,))),
        (MISTRAL, 'So: [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}, {"name": "f"}]',
         Said("So: ", (ADD, Call("f", {})))),
        (NAMED, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]f[CALL_ID]x1[ARGS]{}', Said("", (ADD, Call("f", {})))),
    ],
)  # fmt: skip
def test_calls_are_read_as_the_model_wrote_them(tools: ToolFormat, text: str, said: Said) -> None:
    assert tools.read(text) == said


@pytest.mark.parametrize(
    ("tools", "text", "name"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "add"),
        (HERMES, "<tool_call></tool_call>", ""),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "add"),
        (HERMES, '<tool_call>{"name": 7, "arguments": {}}</tool_call>', ""),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>', "f"),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>', "f"),
        (HERMES, "<tool_call>" + '{"x":' * 100_000, ""),
        (LLAMA, '{"name": "add", "parameters": {"a": 1', "add"),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1', "add"),
        (MISTRAL, "[TOOL_CALLS] [7]", ""),
        (NAMED, '[TOOL_CALLS]add[ARGS]{"a": ', "add"),
    ],
)
def test_a_call_that_cannot_be_read_is_kept_with_name_text_and_reason(tools: ToolFormat, text: str, name: str) -> None:
    said = tools.read(text)
    (broken,) = said.broken
    assert (said.content, said.calls, broken.name) == ("", (), name)
    assert broken.error
    with pytest.raises(ValueError):  # noqa: PT011 - a lenient parser must not make half a call of it
        parse_partial_json(broken.text[:1000])


@given(st.sampled_from([HERMES, LLAMA, MISTRAL, NAMED]), st.text(max_size=40))
def test_any_text_is_read_and_plain_text_is_all_content(tools: ToolFormat, text: str) -> None:
    said = tools.read(text)
    marks = ("<tool_call>", "[TOOL_CALLS]", "{")
    if not any(mark in text for mark in marks):
        assert said.content == text


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        (HERMES, 'Sure, I will <b>add</b>. <tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'),
        (MISTRAL, 'A list [TOO short] comes [TOOL_CALLS] [{"name": "add", "arguments": {}}]'),
        (LLAMA, ' \n{"name": "add", "parameters": {}}'),
        (LLAMA, "Plain {text} of an answer"),
        (LLAMA, '<|python_tag|>{"name": "add", "parameters": {}}'),
        (LLAMA, "<b>not a call</b>"),
    ],
)
def test_what_is_shown_early_is_content_in_the_end(tools: ToolFormat, text: str) -> None:
    content = tools.read(text).content
    shown = [tools.num_shown(text[:size]) for size in range(len(text) + 1)]
    assert shown == sorted(shown)
    assert all(content.startswith(text[:size]) for size in shown)
    assert "<tool" not in content


@pytest.mark.parametrize("tools", [HERMES, LLAMA, MISTRAL, NAMED])
def test_an_opened_answer_goes_on_to_a_call(tools: ToolFormat) -> None:
    arguments = '{"a": 1, "b": 2}'
    named = tools.opening("add") + arguments + ("" if tools is NAMED else "}" + ("]" if tools is MISTRAL else ""))
    assert tools.read(named).calls == (ADD,)
    assert tools.num_shown(named) == 0
    assert named.startswith(tools.opening(None))


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (templates.HERMES, HermesFormat),
        (templates.THINKING, HermesFormat),
        (templates.NO_CALLS, HermesFormat),
        (templates.LLAMA, LlamaFormat),
        (templates.MISTRAL, MistralFormat),
    ],
)
def test_the_format_is_found_by_what_the_template_writes(template: str, kind: type[ToolFormat]) -> None:
    assert isinstance(loaded(template).tool_format(), kind)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(tiny.CHATML, "knows no tools"), (templates.UNKNOWN_CALLS, "not known here.*Hermes"), (None, "takes no tools")],
)
def test_a_template_without_tools_is_refused_and_says_so(template: str | None, reason: str) -> None:
    asked = loaded(template)
    for _ in range(2):  # also when it was found out before
        with pytest.raises(ConfigError, match=reason):
            asked.tool_format()


@pytest.mark.parametrize(
    ("choice", "meant"),
    [
        *((None, None), ("auto", None), ("none", False), ("any", True), ("required", True), (True, True)),
        *(("find", "find"), ({"type": "function", "function": {"name": "add"}}, "add"), ({"name": "add"}, "add")),
    ],
)
def test_a_tool_choice_is_understood_in_every_spelling(choice: Any, meant: Any) -> None:
    assert check_choice(choice, TOOLS) == meant


def test_any_of_one_tool_is_that_tool() -> None:
    assert check_choice("any", TOOLS[:1]) == "add"


@pytest.mark.parametrize("choice", ["subtract", {"type": "function"}, {}, 7, ["add"], {"function": "add"}])
def test_a_choice_of_no_bound_tool_is_refused(choice: Any) -> None:
    with pytest.raises(ConfigError, match="tool_choice must be"):
        check_choice(choice, TOOLS)
