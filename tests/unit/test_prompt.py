"""Placeholders, states and addresses: what a node reads, without a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel
from transformers import DynamicCache

from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.errors import ConfigError, MalformedHandle
from aaflow_langgraph.graph.prompt import Address, Prompt, state_values
from aaflow_langgraph.handle import KVHandle

HANDLE = KVHandle("a" * 64, "b" * 64, 3)


def rendered(text: str, values: dict[str, Any]) -> str:
    return Prompt.parse(text, what="the prompt").render(values)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("no placeholder", "no placeholder"),
        ("{question}", "why?"),
        ("Q: {question} A: {count}{question}", "Q: why? A: 3why?"),
        ('{{"json": {count}}} }}{{', '{"json": 3} }{'),
        ("{{question}}", "{question}"),
        ("{my-key} {_under} {ключ}", "dash low ключ"),
        ("{raw}", "bÿtes"),
        ("{answers}", "['a', 'b']"),
        ("{empty}!{blank}!{blank-bytes}!", "! \n! !"),
    ],
)
def test_plain_state_keys_are_replaced_and_doubled_braces_are_braces(text: str, expected: str) -> None:
    values = {
        "question": "why?",
        "count": 3,
        "my-key": "dash",
        "_under": "low",
        "ключ": "ключ",
        "raw": "bÿtes".encode(),
        "answers": ["a", "b"],
        "empty": "",
        "blank": " \n",
        "blank-bytes": b" ",
    }
    assert rendered(text, values) == expected


def test_a_value_with_braces_is_not_read_as_a_template() -> None:
    assert rendered("{question}", {"question": "{secret} {0} }{"}) == "{secret} {0} }{"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{0}",
        "{question.upper}",
        "{question[0]}",
        "{question.__class__.__mro__}",
        "{question!r}",
        "{question:>10}",
        "{question:{width}}",
        "{question!r:>10}",
        "{ question }",
        '{"json": 1}',
        "{question",
        "question}",
        "{",
        "{a b}",
    ],
)
def test_everything_but_a_plain_state_key_is_refused_when_the_prompt_is_made(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\{\{"):
        Prompt.parse(text, what="the prompt")


@pytest.mark.parametrize("text", ["", "  \n", 7, None, "lone \ud800 surrogate"])
def test_a_prompt_must_be_text(text: Any) -> None:
    with pytest.raises(ConfigError, match="the prompt"):
        Prompt.parse(text, what="the prompt")


def test_missing_and_none_keys_are_named_with_the_keys_that_are_present() -> None:
    with pytest.raises(ConfigError, match=r"needs the state keys missing, none; the state has count, question\."):
        rendered("{question} {missing} {none}", {"question": "q", "count": 1, "none": None})


@pytest.mark.parametrize(
    "value", [HANDLE, HANDLE.to_dict(), {"branch": HANDLE}, {"branch": HANDLE.to_dict()}, {"kv_id": "forged"}]
)
def test_a_handle_is_never_printed_into_a_prompt(value: Any) -> None:
    with pytest.raises(ConfigError, match="name it in reads='docs'"):
        rendered("{docs}", {"docs": value})


@pytest.mark.parametrize("value", [b"\xff\xfe", "\ud800"])
def test_a_value_that_is_no_unicode_text_is_refused_with_its_position(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"'question'.*(offset 0|character 0)"):
        rendered("{question}", {"question": value})


@dataclass
class DataState:
    question: str
    docs: KVHandle | None = None


class ModelState(BaseModel):
    question: str
    docs: KVHandle | None = None


@pytest.mark.parametrize(
    "state", [{"question": "q", "docs": None}, DataState("q"), ModelState(question="q")], ids=["dict", "data", "model"]
)
def test_all_three_kinds_of_state_are_read(state: Any) -> None:
    assert dict(state_values(state)) == {"question": "q", "docs": None}


@pytest.mark.parametrize("state", ["text", ["list"], None, 3, DataState, HANDLE.kv_id])
def test_a_state_without_keys_is_refused(state: Any) -> None:
    with pytest.raises(ConfigError, match="state with keys"):
        state_values(state)


def test_an_address_reads_a_key_or_one_branch_of_it() -> None:
    values = {"docs": HANDLE, "drafts": {"a.b": HANDLE, "c": HANDLE.to_dict()}, "topic": "c"}
    assert Address.parse("docs").handle(values) is HANDLE
    assert Address.parse("drafts.a.b").handle(values) is HANDLE
    assert Address.parse("drafts.{topic}").handle(values) == HANDLE
    assert isinstance(Address.parse("drafts.c").handle(values), KVHandle)


def test_a_plain_dict_of_a_handles_shape_is_read_as_a_handle() -> None:
    read = Address.parse("docs").handle({"docs": HANDLE.to_dict()})
    assert isinstance(read, KVHandle)
    assert read == HANDLE


@pytest.mark.parametrize(
    ("address", "values", "message"),
    [
        ("docs", {"question": "q"}, r"writes='docs' has to run before.*The state has question"),
        ("docs", {"docs": None}, "writes='docs' has to run before"),
        ("docs", {}, "no keys"),
        ("drafts.c", {}, "writes='drafts' has to run before"),
        ("drafts.c", {"drafts": {"a": HANDLE}}, r"no branch 'c', only a; .*branch='c'"),
        ("drafts.{topic}", {"drafts": {"a": HANDLE}}, "needs the state keys topic"),
        ("drafts", {"drafts": {"a": HANDLE, "b": HANDLE}}, r"holds branches: a, b; name one: reads='drafts\.<branch>'"),
        ("docs", {"docs": DynamicCache()}, "DynamicCache"),
    ],
)
def test_nothing_to_read_is_an_error_that_names_the_writer(address: str, values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Address.parse(address).handle(values)


@pytest.mark.parametrize("value", ["garbage", 3, {}, {"kv_id": "x"}, {**HANDLE.to_dict(), "kv_tokens": 0}])
def test_what_is_no_handle_is_malformed_and_the_key_is_named(value: Any) -> None:
    with pytest.raises(MalformedHandle, match="'docs'"):
        Address.parse("docs").handle({"docs": value})


def test_an_address_reads_a_composite_and_what_a_serialiser_made_of_it() -> None:
    composite = KVComposite.of([HANDLE])
    for value in (composite, composite.to_dict()):
        for read in (Address.parse("docs").handle({"docs": value}), Address.parse("docs").segments({"docs": value})):
            assert isinstance(read, KVComposite)
            assert read == composite
    with pytest.raises(MalformedHandle, match="'docs'"):
        Address.parse("docs").handle({"docs": {**composite.to_dict(), "kv_k": -1}})


def test_segments_are_one_handle_or_all_branches_by_name() -> None:
    other = KVHandle("c" * 64, HANDLE.kv_namespace, 9, kv_label="other")
    values = {"docs": HANDLE, "drafts": {"z": HANDLE.to_dict(), "a": other, "b": HANDLE}}
    assert Address.parse("docs").segments(values) is HANDLE
    assert Address.parse("drafts.a").segments(values) is other
    branches = Address.parse("drafts").segments(values)
    assert branches == KVComposite.of({"a": other, "b": HANDLE, "z": HANDLE})
    assert isinstance(branches, KVComposite)
    assert branches.kv_child_labels == ("a", "b", "z")


def test_no_branch_to_join_is_an_error_that_names_the_writer() -> None:
    with pytest.raises(ConfigError, match="writes='drafts' has to run before"):
        Address.parse("drafts").segments({"drafts": {}})
    with pytest.raises(MalformedHandle, match=r"'drafts\.b'"):
        Address.parse("drafts").segments({"drafts": {"a": HANDLE, "b": "text"}})


@pytest.mark.parametrize("text", ["", ".branch", "docs.", "docs.{a.b}", 3])
def test_an_address_that_names_nothing_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError):
        Address.parse(text)
