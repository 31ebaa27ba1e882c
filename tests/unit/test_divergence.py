"""What stands at the first difference of two prompts, and what that says of the cause. One token per byte."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.engine.turns import common_prefix
from aaflow_langgraph.explain.divergence import Divergence, Prompt, divergence
from aaflow_langgraph.model import Span, Turn

REST = " You are a helpful assistant who answers every question in one short sentence."


def encode(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def decode(ids: Sequence[int]) -> str:
    return bytes(ids).decode(errors="replace")


def chat(*turns: tuple[str, str]) -> Prompt:
    ids: tuple[int, ...] = ()
    spans = []
    for role, text in turns:
        ids += encode(f"<|im_start|>{role}\n")
        spans.append(Turn(role, Span(len(ids), len(ids) + len(encode(text))), False))
        ids += encode(f"{text}<|im_end|>\n")
    return Prompt(ids + encode("<|im_start|>assistant\n"), tuple(spans))


def between(asked: str, known: str, *, same_asker: bool = True) -> Divergence:
    """Where two system prompts part, in front of one question."""
    prompts = [chat(("system", text), ("user", "Which city is it?")) for text in (asked, known)]
    found = divergence(prompts[0], prompts[1], decode, same_asker=same_asker)
    assert found is not None
    # What is found does not hang on the chat turns that a recipe knows: marks in the text say the same.
    bare = divergence(*(Prompt(one.token_ids) for one in prompts), decode, same_asker=same_asker)
    assert bare is not None
    assert (bare.cause, bare.role, bare.position) == (found.cause, found.role, found.position)
    return found


@pytest.mark.parametrize(
    ("asked", "known", "what"),
    [
        ("Now: 2026-11-29 10:31.", "Now: 2026-11-30 08:12.", "a date or time"),
        ("Now: 2026-11-29T10:31:07.123.", "Now: 2026-11-29T10:31:09.001.", "a date or time"),
        ("It is 10:31.", "It is 9:02.", "a date or time"),
        ("Today is November 29, 2026.", "Today is December 1, 2026.", "a date or time"),
        ("Today is 29 Nov 2026.", "Today is 1 Dec 2026.", "a date or time"),
        ("Today is Sunday.", "Today is Monday.", "a date or time"),
        ("Date: 29.11.2026.", "Date: 30.11.2026.", "a date or time"),
        ("User 3f2504e0-4f89-41d3-9a0c-0305e82c3301.", "User 7c9e6679-7425-40de-944b-e07fc1f90ae7.", "a UUID"),
        ("Trace 9f86d081884c7d65.", "Trace 2c26b46b68ffc68f.", "a hexadecimal id"),
        ("At 1764412267.", "At 1764498667.", "a long number"),
        ("Request 12.", "Request 13.", "a counter"),
        ("Session id: 7.", "Session id: 8.", "a counter"),
    ],
)
def test_dates_times_and_ids_are_told_by_kind(asked: str, known: str, what: str) -> None:
    found = between(asked + REST, known + REST)
    assert (found.cause, found.what, found.role) == ("volatile", what, "system")
    assert found.asked != found.known


TOOLS = [
    f'{{"type": "function", "function": {{"name": "{name}", "parameters": {{}}}}}}' for name in ("search", "add", "sum")
]


def with_tools(tools: Sequence[str]) -> str:
    return f"{REST}\n<tools>\n" + "\n".join(tools) + "\n</tools>"


def test_the_same_tools_in_another_order_are_told_from_another_list() -> None:
    assert between(with_tools(TOOLS[::-1]), with_tools(TOOLS)).what == "the same tools in another order"
    other = between(with_tools(TOOLS), with_tools([*TOOLS[:1], '{"name": "look", "function": 1}']))
    assert (other.cause, other.what) == ("tools", "another list of tools")
    # Another agent may have other tools.
    assert between(with_tools(TOOLS), with_tools(TOOLS[1:]), same_asker=False).cause == "none"


def test_another_system_prompt_is_a_fault_of_one_node_and_of_two_that_share_what_comes_behind() -> None:
    assert between("You are Ann." + REST, "You are Bob." + REST).cause == "system"
    assert between("You are Ann." + REST, "You are Bob." + REST, same_asker=False).cause == "none"
    shared = "Berlin is the capital of Germany. " * 4
    prompts = [chat(("system", f"You are {name}."), ("user", shared)) for name in ("Ann", "Bob")]
    found = divergence(prompts[0], prompts[1], decode, same_asker=False)
    assert found is not None
    assert found.cause == "system"


@pytest.mark.parametrize(
    ("asked", "known"),
    [
        ("It is Berlin.", "<think>\nGermany.\n</think>\n\nIt is Berlin."),
        ("<think>\n\n</think>\n\nIt is Berlin.", "It is Berlin."),
        ("<think>\n\n</think>\n\nIt is Berlin.", "<think>\nGermany.\n</think>\n\nIt is Berlin."),
    ],
)
def test_reasoning_on_one_side_only_was_dropped_by_the_template(asked: str, known: str) -> None:
    question = ("user", "Which city?")
    prompt = chat(question, ("assistant", asked), ("user", "And why?"))
    found = divergence(prompt, chat(question, ("assistant", known)), decode, same_asker=True)
    assert found is not None
    assert (found.cause, found.role, found.is_last_turn) == ("think", "assistant", False)


def test_an_earlier_turn_that_was_edited_is_not_a_new_question() -> None:
    first = ("user", "Which city is the capital of Germany?")
    edited = chat(("user", "What do we know of Germany?"), ("assistant", "Berlin."), ("user", "Why?"))
    found = divergence(edited, chat(first, ("assistant", "Berlin.")), decode, same_asker=True)
    assert found is not None
    assert (found.cause, found.what) == ("history", "an earlier user turn")
    asked = divergence(chat(("user", "Which river is it?")), chat(first), decode, same_asker=True)
    assert asked is not None
    assert (asked.cause, asked.is_last_turn) == ("none", True)


def test_the_same_text_as_other_token_ids_was_encoded_again() -> None:
    words = {1: "the", 2: "th", 3: "e", 4: " city", 5: "re", 6: " is"}

    def spell(ids: Sequence[int]) -> str:
        return "".join(words[token] for token in ids)

    found = divergence(Prompt((4, 1, 4, 6)), Prompt((4, 2, 3, 4)), spell, same_asker=False)
    assert found is not None
    assert (found.cause, found.position) == ("retokenised", 1)
    other = divergence(Prompt((4, 1, 4, 6)), Prompt((4, 2, 5, 4)), spell, same_asker=False)
    assert other is not None
    assert other.cause == "none"


@given(st.text(max_size=60), st.text(max_size=60), st.booleans())
def test_any_two_prompts_are_compared_and_the_position_is_the_first_difference(a: str, b: str, same: bool) -> None:
    asked, known = Prompt(encode(a)), Prompt(encode(b))
    found = divergence(asked, known, decode, same_asker=same)
    at = common_prefix(asked.token_ids, known.token_ids)
    if at in (len(asked.token_ids), len(known.token_ids)):
        assert found is None
    else:
        assert found is not None
        assert found.position == at
        assert (found.asked_id, found.known_id) == (asked.token_ids[at], known.token_ids[at])
