"""A handle is found wherever state can hold one, and nothing else is taken for one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langchain_core.messages import AIMessage
from langgraph.checkpoint.serde.types import _DeltaSnapshot
from langgraph.types import Command, Interrupt, Overwrite, Send
from pydantic import BaseModel, ConfigDict

from aaflow_langgraph import KVComposite, KVHandle
from aaflow_langgraph.checkpoint.find import find_handles


def handle(number: int = 1) -> KVHandle:
    return KVHandle(f"{number:064x}", "cd" * 32, 5)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Plain:
    value: Any
    rest: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    value: Any


class Model(BaseModel):
    model_config = ConfigDict(extra="allow", arbitrary_types_allowed=True)
    value: Any = None


class Ring:
    """A list that holds itself, and a handle."""

    def __new__(cls) -> Any:
        ring: list[Any] = [handle()]
        ring.append({"again": ring})
        return ring


@pytest.mark.parametrize(
    "value",
    [
        handle(),
        handle().to_dict(),
        {"docs": handle()},
        {handle(): "as a key"},
        [1, "x", [None, (handle(),)]],
        {handle()},
        frozenset({handle()}),
        deque([handle()]),
        Pair(1, handle()),
        Plain(Slotted([handle()])),
        Plain({}, [handle().to_dict()]),
        Model(value={"deep": [Model(value=handle())]}),
        Model(extra=handle()),
        AIMessage("hello", additional_kwargs={"kv": handle()}),
        AIMessage("hello", response_metadata={"kv": handle().to_dict()}),
        AIMessage("hello", response_metadata={"kv": {**handle().to_dict(), "num_reused": 3, "words": "hello"}}),
        Send("node", {"docs": handle()}),
        Send("node", handle()),
        Interrupt(value={"read": handle()}, id="1"),
        Command(update={"docs": handle()}, goto=[Send("n", {})]),
        Command(goto=[Send("n", {"docs": handle()})]),
        Overwrite(handle()),
        {"__overwrite__": handle().to_dict()},
        _DeltaSnapshot([handle()]),
        ("task", [("channel", handle())]),
        KVComposite.of([handle()]),
        {"sources": KVComposite.of([handle()]).to_dict()},
        Ring(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_it_is_found(value: Any) -> None:
    assert find_handles(value) == (handle(),)
    assert find_handles({"nested": [{"once": value}, value]}) == (handle(),)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "ab" * 32,
        b"kv",
        {"kv_id": "ab" * 32},
        {**handle().to_dict(), "kv_id": "short"},
        {**handle().to_dict(), "kv_tokens": True},
        KVHandle,
        Plain,
        object(),
        iter([handle()]),
        [*range(1000)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_else_is(value: Any) -> None:
    assert find_handles(value) == ()


def test_what_has_nearly_a_handles_shape_is_looked_into() -> None:
    value = {"kv_id": handle(2), "kv_namespace": handle(3), "kv_tokens": handle(4)}
    assert find_handles(value) == (handle(2), handle(3), handle(4))


def test_a_dict_that_names_a_handle_keeps_whether_it_is_exact() -> None:
    (found,) = find_handles({**handle().to_dict(), "kv_exact": False, "num_reused": 3})
    assert not found.kv_exact


def test_a_composite_counts_as_its_children_and_a_forged_one_as_nothing() -> None:
    composite = KVComposite.of([handle(3), handle(1), handle(2)])
    expected = (handle(1), handle(2), handle(3))
    assert find_handles({"sources": composite, "again": handle(2)}) == expected
    assert find_handles([composite.to_dict()]) == expected
    assert find_handles({**composite.to_dict(), "kv_k": -1}) == ()


def test_depth_does_not_matter() -> None:
    value: Any = handle()
    for _ in range(50_000):
        value = [value]
    assert find_handles(value) == (handle(),)


def test_a_slot_that_was_never_filled_is_passed_over() -> None:
    empty = object.__new__(Slotted)
    assert find_handles([empty, handle()]) == (handle(),)


@given(
    st.recursive(
        st.integers(0, 5).map(handle) | st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(max_size=3), inner, max_size=4)
            | st.tuples(inner, inner)
            | inner.map(Plain)
            | inner.map(lambda item: Send("n", item))
            | inner.map(lambda item: Model(value=item))
        ),
        max_leaves=20,
    )
)
def test_every_handle_is_found_once_in_the_order_of_ids(value: Any) -> None:
    shown = repr(value)
    found = find_handles(value)
    assert list(found) == [handle(n) for n in range(6) if f"{n:064x}" in shown]
