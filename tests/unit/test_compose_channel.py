"""The laws of KVCompose, without a broker and without a model."""

from __future__ import annotations

import itertools
import json
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.channels.last_value import LastValue
from langgraph.errors import EmptyChannelError, InvalidUpdateError
from langgraph.graph import StateGraph
from langgraph.types import Overwrite
from typing_extensions import TypedDict

from aaflow_langgraph.composite import ComposePolicy, KVComposite
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.channels import KVChannel
from aaflow_langgraph.graph.compose_channel import KVCompose
from aaflow_langgraph.graph.rejected import rejected_writes
from aaflow_langgraph.handle import KVHandle

NAMESPACE = "f" * 64
POLICY = ComposePolicy(rung="blend", r=0.3)


def handle(digit: int, label: str = "") -> KVHandle:
    return KVHandle(f"{digit:x}" * 64, NAMESPACE, 10 + digit, kv_label=label or f"label{digit}")


A, B, C = handle(1), handle(2), handle(3)
OLD = handle(9, "old")
AB = KVComposite.of([A, B])

MALFORMED = [
    "SECRET text",
    7,
    [],
    [A],
    {},
    {"kv_id": "SECRET"},
    {**A.to_dict(), "kv_tokens": -1},
    {**A.to_dict(), "SECRET": 1},
    {**AB.to_dict(), "kv_k": "SECRET"},
    {**AB.to_dict(), "kv_rung": "SECRET"},
    {**AB.to_dict(), "SECRET": 1},
    {"kv_child_ids": ["SECRET"]},
    {"name": "SECRET"},
    {"name": AB},
    {"SECRET" * 20: A},
    {1: A},
    {"": A},
    b"SECRET",
    object(),
]

OVERWRITE_FORMS = [
    lambda value: Overwrite(value),
    lambda value: {"__overwrite__": value},
    lambda value: {"value": value, "type": "__overwrite__"},
]


def holding(value: Any = None, **policy: Any) -> KVCompose:
    channel = KVCompose(KVHandle, "sources", **policy)
    if value is not None:
        channel.update([value])
    return channel


def after(*writes: Any, current: Any = None, **policy: Any) -> Any:
    channel = holding(current, **policy)
    channel.update(writes)
    return channel.get()


def test_an_empty_channel_is_unavailable_and_its_checkpoint_is_langgraphs_own_sentinel() -> None:
    channel = holding()
    assert not channel.is_available()
    assert channel.checkpoint() is LastValue(KVHandle).checkpoint()
    assert not channel.from_checkpoint(channel.checkpoint()).is_available()
    with pytest.raises(EmptyChannelError):
        channel.get()


@pytest.mark.parametrize("current", [None, OLD, AB])
@pytest.mark.parametrize("value", [A, KVComposite.of([A, C], rung="dense")])
def test_one_write_stays_what_it_is_and_replaces_what_was_there(current: Any, value: Any) -> None:
    channel = holding(current)
    assert channel.update([value]) is True
    assert channel.get() is value


@pytest.mark.parametrize("current", [None, OLD, AB])
def test_different_handles_of_one_step_become_a_composite_under_the_channels_policy(current: Any) -> None:
    expected = KVComposite.of([A, B, C], rung="blend", r=0.3)
    for writes in itertools.permutations([A, B.to_dict(), C]):
        made = after(*writes, current=current, rung="blend", r=0.3)
        assert made == expected
        assert made.kv_composite_id == expected.kv_composite_id


def test_no_write_in_a_step_changes_nothing() -> None:
    channel = holding(AB)
    assert channel.update([]) is False
    assert channel.update(()) is False
    assert channel.get() == AB


@pytest.mark.parametrize("current", [A, AB])
def test_echoes_of_the_current_value_are_no_writes(current: Any) -> None:
    channel = holding(current)
    assert channel.update([current, current.to_dict()]) is False
    assert after(current, C, current.to_dict(), current=current) == C
    assert after(current, B, C, current=current) == KVComposite.of([B, C])


def test_a_part_of_the_current_composite_is_no_echo() -> None:
    assert after(A, C, current=AB) == KVComposite.of([A, C])
    assert after(A, current=AB) == A


def test_equal_handles_collapse_and_the_first_label_stays() -> None:
    renamed = handle(1, "zzz")
    for writes in itertools.permutations([A, A.to_dict(), renamed]):
        assert after(*writes).kv_label == "label1"
    for writes in itertools.permutations([renamed, A, B]):
        made = after(*writes)
        assert made == AB
        assert made.kv_child_labels == ("label1", "label2")


def test_named_handles_stand_by_name_whoever_wrote_them_and_repeat_on_purpose() -> None:
    expected = KVComposite.of({"1": C, "2": A, "3": A})
    assert after({"1": C, "2": A, "3": A}) == expected
    for writes in itertools.permutations([{"3": A}, {"1": C}, {"2": A.to_dict(), "1": C}]):
        made = after(*writes)
        assert made == expected
        assert made.kv_child_labels == ("1", "2", "3")
    assert after({"main": A}) == A


def test_a_named_handle_is_never_an_echo() -> None:
    assert after({"a": A}, {"b": B}, current=A) == AB
    assert after({"a": A}, B, current=A) == KVComposite.of({"a": A, "label2": B})
    assert holding(A).update([{"a": A}]) is False


def test_one_name_for_two_handles_is_langgraphs_own_conflict() -> None:
    channel = holding(OLD)
    with pytest.raises(InvalidUpdateError) as caught:
        channel.update([{"x": A}, {"x": B}])
    for part in ("'sources.x'", "label1", "111111111111", "label2", "222222222222", "KVBranches"):
        assert part in str(caught.value)
    assert channel.get() is OLD


def test_a_composite_beside_other_writes_gives_its_children() -> None:
    other = KVComposite.of({"z": A, "y": B}, rung="dense")
    for writes in itertools.permutations([other, C, A]):
        made = after(*writes)
        assert made.kv_children == (A, C, B)
        assert made.kv_child_labels == ("label1", "label3", "y")
        assert made.policy == ComposePolicy()


def test_an_order_puts_names_first() -> None:
    assert after(A, B, C, order=["label3", "absent"]).kv_children == (C, A, B)
    assert after({"x": A}, {"y": B}, order=["y"]).kv_children == (B, A)


@pytest.mark.parametrize("written", [None, *MALFORMED])
@pytest.mark.parametrize("current", [None, OLD, AB])
def test_none_and_malformed_values_keep_the_current_value_and_are_recorded(written: Any, current: Any) -> None:
    channel = holding(current)
    assert channel.update([written]) is False
    assert channel.is_available() == (current is not None)
    last = rejected_writes()[-1]
    assert last.key in ("sources", "sources.name")
    assert last.kept == {None: "", OLD: "999999999999", AB: AB.kv_composite_id[:12]}[current]
    assert "SECRET" not in last.reason


@pytest.mark.parametrize("written", [None, *MALFORMED])
def test_a_malformed_value_does_not_hide_good_ones(written: Any) -> None:
    assert after(written, A, current=OLD) is A
    assert after(A, written, B, current=OLD) == AB


def test_a_malformed_handle_does_not_hide_the_good_ones_of_the_same_write() -> None:
    assert after({"x": A, "y": "SECRET", 7: B, "z": C}) == KVComposite.of({"x": A, "z": C})


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
@pytest.mark.parametrize("current", [None, OLD, AB])
def test_overwrite_takes_the_step_in_any_form(form: Any, current: Any) -> None:
    for forced, expected in ((A, A), (AB.to_dict(), AB), ({"x": A, "y": C}, KVComposite.of([A, C]))):
        for writes in itertools.permutations([form(forced), B, OLD]):
            assert after(*writes, current=current) == expected
    channel = holding(current)
    assert channel.update([form(None), B]) is (current is not None)
    assert not channel.is_available()


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
def test_an_overwrite_with_garbage_is_recorded_and_forces_nothing(form: Any) -> None:
    for garbage in ("SECRET", {}, {"name": 7}, {**AB.to_dict(), "kv_r": 7}):
        assert after(form(garbage), A, current=OLD) is A


def test_equal_overwrites_agree_and_different_ones_conflict() -> None:
    assert after(Overwrite(A), Overwrite(A.to_dict()), B) == A
    assert after(Overwrite(AB), Overwrite({"x": B, "a": A}), current=OLD) == AB
    for pair in ([A, B], [A, None], [AB, A], [AB, KVComposite.of([A, B], k=3)]):
        with pytest.raises(InvalidUpdateError):
            holding(OLD).update([Overwrite(value) for value in pair])


SOME = [A, B, C, OLD, handle(1, "other"), AB, KVComposite.of([B, C], k=2), {"x": A}, {"y": B, "x": A}, {"z": A}]
WRITES = st.lists(
    st.sampled_from(
        [*SOME, None, "garbage", A.to_dict(), AB.to_dict(), {"w": 7}, Overwrite(A), Overwrite(handle(1, "o"))]
    ),
    max_size=6,
)


@given(WRITES, st.sampled_from([None, OLD, A, AB]), st.randoms())
def test_the_order_of_writes_never_matters_to_the_byte(writes: list[Any], current: Any, random: Any) -> None:
    shuffled = list(writes)
    random.shuffle(shuffled)
    first, second = holding(current), holding(current)
    assert first.update(writes) == second.update(shuffled)
    assert first.is_available() == second.is_available()
    if first.is_available():
        assert first.get().to_dict() == second.get().to_dict()


@given(WRITES, st.sampled_from([None, OLD, A, AB]))
def test_a_step_that_runs_again_gives_the_same_value(writes: list[Any], current: Any) -> None:
    """After an interrupt LangGraph applies the stored writes of the siblings once more, on the stored value."""
    first = holding(current)
    stored = json.loads(json.dumps(first.get().to_dict())) if first.is_available() else first.checkpoint()
    again = first.from_checkpoint(stored)
    first.update(writes)
    again.update(
        [value.to_dict() if isinstance(value, (KVHandle, KVComposite)) else value for value in reversed(writes)]
    )
    assert first.is_available() == again.is_available()
    if first.is_available():
        assert first.get() == again.get()


@pytest.mark.parametrize("value", [A, AB])
def test_a_checkpoint_brings_the_value_back_also_as_plain_dict(value: Any) -> None:
    channel = holding(value, rung="blend")
    for stored in (channel.checkpoint(), value.to_dict(), json.loads(json.dumps(value.to_dict()))):
        again = channel.from_checkpoint(stored)
        assert again.get() == value
        assert type(again.get()) is type(value)
        assert again == channel
    assert not channel.from_checkpoint({"kv_id": "x"}).is_available()
    assert not channel.from_checkpoint(None).is_available()


def test_a_copy_has_the_same_value_and_policy_and_goes_its_own_way() -> None:
    channel = holding(OLD, rung="blend", r=0.3, order=["label2"])
    twin = channel.copy()
    assert twin == channel
    assert twin.key == "sources"
    twin.update([A, B])
    assert twin.get() == KVComposite.joined((B, A), POLICY)
    assert channel.get() is OLD


def test_channels_are_equal_by_policy_and_order() -> None:
    assert holding() == holding(A)
    assert hash(holding()) == hash(holding(A))
    assert holding() != holding(k=3)
    assert holding() != holding(order=["a"])
    assert holding() != KVChannel(KVHandle, "sources")


@pytest.mark.parametrize("option", [{"k": -1}, {"r": 1.5}, {"rung": "x"}, {"order": "x"}, {"exact": 1}])
def test_a_policy_that_cannot_be_right_is_refused_when_the_state_is_declared(option: Any) -> None:
    with pytest.raises(ConfigError):
        KVCompose(**option)


def test_langgraph_takes_the_class_and_an_instance_and_allows_both_types() -> None:
    class State(TypedDict):
        plain: Annotated[KVHandle, KVCompose]
        tuned: Annotated[KVHandle | KVComposite, KVCompose(rung="blend", r=0.3)]
        optional: Annotated[KVHandle | KVComposite | None, KVCompose]

    channels = StateGraph(State).channels
    for name in ("plain", "tuned", "optional"):
        assert isinstance(channels[name], KVCompose)
        assert channels[name].key == name
        assert channels[name].ValueType == KVHandle | KVComposite
    assert channels["tuned"].policy == POLICY
    assert channels["plain"].policy == ComposePolicy()
