"""The laws of KVChannel and KVBranches, without a graph and without a model."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from langgraph.channels.last_value import LastValue
from langgraph.errors import EmptyChannelError, InvalidUpdateError
from langgraph.types import Overwrite

from aaflow_langgraph.graph.channels import KVBranches, KVChannel
from aaflow_langgraph.graph.rejected import MAX_REJECTED, rejected_writes
from aaflow_langgraph.handle import KVHandle

NAMESPACE = "f" * 64


def handle(digit: int, label: str = "") -> KVHandle:
    return KVHandle(f"{digit:x}" * 64, NAMESPACE, 10 + digit, kv_label=label or f"label{digit}")


A, B, C = handle(1), handle(2), handle(3)
OLD = handle(9, "old")

MALFORMED = [
    "SECRET text",
    7,
    [],
    [A],
    {},
    {"kv_id": "SECRET"},
    {**A.to_dict(), "kv_tokens": -1},
    {**A.to_dict(), "kv_id": "SECRET"},
    {**A.to_dict(), "SECRET": 1},
    {**A.to_dict(), "kv_preview": "SECRET " * 100},
    {1: 2},
    b"SECRET",
    object(),
]

OVERWRITE_FORMS = [
    lambda value: Overwrite(value),
    lambda value: {"__overwrite__": value},
    lambda value: {"value": value, "type": "__overwrite__"},
]


def holding(value: KVHandle | None) -> KVChannel:
    channel = KVChannel(KVHandle, "docs")
    if value is not None:
        channel.update([value])
    return channel


def branching(value: Mapping[str, Any]) -> KVBranches:
    channel = KVBranches(dict[str, KVHandle], "drafts")
    channel.update([value])
    return channel


# --- KVChannel ---


def test_an_empty_channel_is_unavailable_and_its_checkpoint_is_langgraphs_own_sentinel() -> None:
    channel = KVChannel(KVHandle, "docs")
    assert not channel.is_available()
    assert channel.checkpoint() is LastValue(KVHandle).checkpoint()
    assert not channel.from_checkpoint(channel.checkpoint()).is_available()
    with pytest.raises(EmptyChannelError):
        channel.get()


def test_the_last_write_wins_over_steps() -> None:
    channel = holding(A)
    assert channel.update([B]) is True
    assert channel.get() is B


def test_no_write_in_a_step_changes_nothing() -> None:
    channel = holding(A)
    assert channel.update([]) is False
    assert channel.update(()) is False
    assert channel.get() is A


def test_a_write_equal_to_the_current_value_is_no_write() -> None:
    channel = holding(A)
    renamed = KVHandle(A.kv_id, A.kv_namespace, A.kv_tokens, kv_label="another label")
    assert channel.update([A]) is False
    assert channel.update([A.to_dict()]) is False
    assert channel.update([renamed]) is False
    assert channel.update([A, renamed, A.to_dict()]) is False
    assert channel.get().kv_label == A.kv_label


def test_parallel_echoes_beside_one_new_handle_do_not_conflict() -> None:
    channel = holding(OLD)
    assert channel.update([OLD, A, OLD.to_dict(), A]) is True
    assert channel.get() == A


def test_two_different_handles_in_one_step_raise_langgraphs_own_error_naming_both() -> None:
    channel = holding(OLD)
    with pytest.raises(InvalidUpdateError) as caught:
        channel.update([A, B])
    message = str(caught.value)
    for part in ("'docs'", "label1", "111111111111", "11 tokens", "label2", "222222222222", "12 tokens", "KVBranches"):
        assert part in message
    assert "INVALID_CONCURRENT_GRAPH_UPDATE" in message
    assert channel.get() is OLD


@pytest.mark.parametrize("written", [None, *MALFORMED])
@pytest.mark.parametrize("current", [None, OLD])
def test_none_and_malformed_values_keep_the_current_value_and_are_recorded(written: Any, current: Any) -> None:
    channel = holding(current)
    assert channel.update([written]) is False
    assert channel.is_available() == (current is not None)
    last = rejected_writes()[-1]
    assert last.key == "docs"
    assert last.kept == ("" if current is None else "999999999999")
    assert "SECRET" not in last.reason


@pytest.mark.parametrize("written", MALFORMED)
def test_a_malformed_value_does_not_hide_a_good_one(written: Any) -> None:
    channel = holding(OLD)
    assert channel.update([written, A]) is True
    assert channel.get() is A


def test_a_rejection_is_logged_as_a_warning_that_quotes_nothing_of_the_value(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="aaflow_langgraph.graph"):
        for written in MALFORMED:
            holding(OLD).update([written])
    assert len(caplog.records) == len(MALFORMED)
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "docs" in caplog.text
    assert "SECRET" not in caplog.text


def test_none_is_no_news_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aaflow_langgraph.graph"):
        holding(OLD).update([None])
    assert caplog.records == []
    assert rejected_writes()[-1].reason == "None"


def test_the_record_of_rejections_is_bounded_and_counts_repeats() -> None:
    for number in range(MAX_REJECTED + 20):
        KVChannel(KVHandle, f"key{number}").update(["garbage"])
    KVChannel(KVHandle, "key119").update(["garbage"])
    assert len(rejected_writes()) == MAX_REJECTED
    assert rejected_writes()[-1].key == "key119"
    assert rejected_writes()[-1].count >= 2


def test_a_plain_dict_of_a_handles_shape_becomes_a_handle() -> None:
    channel = KVChannel(KVHandle, "docs")
    assert channel.update([json.loads(json.dumps(A.to_dict()))]) is True
    assert isinstance(channel.get(), KVHandle)
    assert channel.get() == A


def test_a_checkpoint_survives_as_object_and_as_plain_dict() -> None:
    assert holding(A).from_checkpoint(holding(A).checkpoint()).get() == A
    restored = KVChannel(KVHandle, "docs").from_checkpoint(A.to_dict())
    assert isinstance(restored.get(), KVHandle)
    assert restored.key == "docs"


@pytest.mark.parametrize("stored", [None, *MALFORMED])
def test_a_malformed_checkpoint_is_an_empty_channel(stored: Any) -> None:
    assert not KVChannel(KVHandle, "docs").from_checkpoint(stored).is_available()


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
def test_overwrite_wins_over_plain_writes_of_its_step_in_all_three_forms(form: Any) -> None:
    for written in itertools.permutations([form(A), B, C]):
        channel = holding(OLD)
        assert channel.update(written) is True
        assert channel.get() == A


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
def test_overwrite_takes_a_plain_dict(form: Any) -> None:
    channel = holding(OLD)
    assert channel.update([form(A.to_dict())]) is True
    assert channel.get() == A


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
def test_overwrite_with_none_empties_the_channel(form: Any) -> None:
    channel = holding(OLD)
    assert channel.update([form(None)]) is True
    assert not channel.is_available()
    assert channel.update([form(None)]) is False


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
@pytest.mark.parametrize("written", MALFORMED)
def test_overwrite_with_a_malformed_value_keeps_the_current_one(form: Any, written: Any) -> None:
    channel = holding(OLD)
    assert channel.update([form(written)]) is False
    assert channel.get() is OLD


def test_overwrite_with_the_current_value_settles_a_step_without_a_write() -> None:
    channel = holding(OLD)
    assert channel.update([Overwrite(OLD), A, B]) is False
    assert channel.get() is OLD


@pytest.mark.parametrize("other", [B, None])
def test_two_different_overwrites_in_one_step_conflict(other: Any) -> None:
    with pytest.raises(InvalidUpdateError, match="2 different"):
        holding(OLD).update([Overwrite(A), Overwrite(other)])


def test_a_copy_is_independent_of_the_original() -> None:
    channel = holding(A)
    twin = channel.copy()
    twin.update([B])
    assert channel.get() is A
    assert twin.get() is B
    assert (twin.key, twin.typ) == (channel.key, channel.typ)
    assert not KVChannel(KVHandle, "docs").copy().is_available()


def test_channels_are_equal_by_configuration_and_hashable() -> None:
    assert holding(A) == KVChannel(KVHandle | None, "other")
    assert hash(holding(A)) == hash(KVChannel())
    assert KVChannel() != KVBranches()
    assert KVChannel() != LastValue(KVHandle)
    assert not hasattr(KVChannel(), "__dict__")


def test_both_types_are_the_handle_class_whatever_the_annotation_was() -> None:
    channel = KVChannel(KVHandle | None)
    assert channel.ValueType is KVHandle
    assert channel.UpdateType is KVHandle
    assert KVBranches().ValueType == KVBranches().UpdateType == dict[str, KVHandle]


WRITES = st.lists(
    st.one_of(
        st.sampled_from([A, B, OLD]),
        st.sampled_from([A, OLD]).map(lambda h: h.to_dict()),
        st.sampled_from([None, "garbage", 3]),
        st.sampled_from([A, OLD, None]).map(Overwrite),
    ),
    max_size=5,
)


@given(st.sampled_from([None, OLD]), WRITES, st.randoms())
def test_the_order_of_writes_in_a_step_never_matters(current: Any, writes: list[Any], random: Any) -> None:
    shuffled = list(writes)
    random.shuffle(shuffled)
    outcomes = []
    for order in (writes, shuffled):
        channel = holding(current)
        try:
            changed = channel.update(order)
        except InvalidUpdateError:
            changed = None
        outcomes.append((changed, channel.get() if channel.is_available() else None))
    assert outcomes[0] == outcomes[1]


@given(st.sampled_from([None, OLD]), WRITES)
def test_update_is_idempotent_and_its_result_says_whether_the_value_changed(current: Any, writes: list[Any]) -> None:
    channel = holding(current)
    before = channel.copy()
    try:
        changed = channel.update(writes)
    except InvalidUpdateError:
        assert channel.checkpoint() is before.checkpoint()
        return
    assert changed == (channel.checkpoint() != before.checkpoint())
    assert channel.update([Overwrite(channel.get())] if channel.is_available() else []) is False


# --- KVBranches ---


def test_branches_start_empty_and_available() -> None:
    channel = KVBranches(dict[str, KVHandle], "drafts")
    assert channel.is_available()
    assert channel.get() == {}
    assert channel.from_checkpoint(LastValue(dict).checkpoint()).get() == {}


def test_branches_of_parallel_nodes_merge_in_a_deterministic_order() -> None:
    results = []
    for writes in itertools.permutations([{"b": B}, {"a": A}, {"c": C.to_dict()}]):
        channel = branching({"old": OLD})
        assert channel.update(writes) is True
        results.append(list(channel.get().items()))
    assert all(result == results[0] for result in results)
    assert results[0] == [("a", A), ("b", B), ("c", C), ("old", OLD)]


def test_one_write_may_carry_several_branches() -> None:
    channel = branching({"a": A, "b": B})
    assert channel.get() == {"a": A, "b": B}


def test_an_equal_branch_is_no_write() -> None:
    channel = branching({"a": A, "b": B})
    assert channel.update([{"a": A}, {"b": B.to_dict()}, {}]) is False
    assert channel.update([]) is False


def test_an_echo_of_the_whole_mapping_beside_a_new_branch_value_does_not_conflict() -> None:
    channel = branching({"a": OLD})
    assert channel.update([channel.get(), {"a": A}, channel.get()]) is True
    assert channel.get() == {"a": A}


def test_two_different_handles_for_one_branch_conflict_and_nothing_is_written() -> None:
    channel = branching({"a": OLD})
    with pytest.raises(InvalidUpdateError) as caught:
        channel.update([{"a": A, "z": C}, {"a": B}])
    assert "'drafts.a'" in str(caught.value)
    assert "label1" in str(caught.value)
    assert "label2" in str(caught.value)
    assert channel.get() == {"a": OLD}


def test_none_for_a_branch_keeps_it_and_malformed_branches_do_not_stop_the_others() -> None:
    channel = branching({"a": A, "b": B})
    assert channel.update([{"a": None, "b": "garbage", "c": C}]) is True
    assert channel.get() == {"a": A, "b": B, "c": C}
    assert rejected_writes()[-1].key == "drafts.b"


@pytest.mark.parametrize("written", [None, *MALFORMED, A, A.to_dict(), {"": A}, {3: A}])
def test_what_is_no_mapping_of_branches_is_no_write(written: Any) -> None:
    channel = branching({"a": OLD})
    assert channel.update([written]) is False
    assert channel.get() == {"a": OLD}


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
def test_overwrite_replaces_all_branches(form: Any) -> None:
    channel = branching({"a": OLD, "b": B})
    assert channel.update([{"z": C}, form({"a": A.to_dict()})]) is True
    assert channel.get() == {"a": A}
    assert channel.update([form({})]) is True
    assert channel.get() == {}
    channel.update([{"a": A}])
    assert channel.update([form(None)]) is True
    assert channel.get() == {}


@pytest.mark.parametrize("form", OVERWRITE_FORMS)
@pytest.mark.parametrize("written", ["garbage", A, A.to_dict(), 3])
def test_overwrite_with_what_is_no_mapping_keeps_the_branches(form: Any, written: Any) -> None:
    channel = branching({"a": OLD})
    assert channel.update([form(written)]) is False
    assert channel.get() == {"a": OLD}


def test_overwrite_keeps_the_current_handle_where_a_branch_is_malformed() -> None:
    channel = branching({"a": OLD, "b": B})
    assert channel.update([Overwrite({"a": "garbage", "c": C})]) is True
    assert channel.get() == {"a": OLD, "c": C}


def test_two_different_overwrites_of_the_branches_conflict_and_two_equal_ones_do_not() -> None:
    channel = branching({"a": OLD})
    with pytest.raises(InvalidUpdateError):
        channel.update([Overwrite({"a": A}), Overwrite({"b": B})])
    assert channel.update([Overwrite({"a": A}), Overwrite({"a": A.to_dict()})]) is True


def test_changing_the_dict_that_a_node_got_does_not_change_the_channel() -> None:
    channel = branching({"a": A})
    twin = channel.copy()
    channel.get().clear()
    twin.update([{"b": B}])
    assert channel.get() == {"a": A}
    assert twin.get() == {"a": A, "b": B}


def test_branches_come_back_from_a_checkpoint_of_plain_dicts() -> None:
    stored = {"b": B.to_dict(), "a": A, "bad": "garbage"}
    restored = KVBranches(dict[str, KVHandle], "drafts").from_checkpoint(stored)
    assert list(restored.get().items()) == [("a", A), ("b", B)]
    assert branching({"a": A}) == KVBranches()
    assert hash(branching({"a": A})) == hash(KVBranches())
