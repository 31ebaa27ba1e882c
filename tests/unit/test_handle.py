"""KVHandle: a value that names KV, survives JSON, and refuses everything that is not one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.errors import MalformedHandle, UsageError
from aaflow_langgraph.handle import MAX_LABEL_CHARS, MAX_PREVIEW_CHARS, MAX_TOKENS, KVHandle, make_preview

ID, NAMESPACE = "0123456789abcdef" * 4, "f" * 64
GOOD: dict[str, Any] = {"kv_id": ID, "kv_namespace": NAMESPACE, "kv_tokens": 7}

BAD_FIELDS = [
    ("kv_id", ID[:-1]),
    ("kv_id", ID + "0"),
    ("kv_id", ID.upper()),
    ("kv_id", "../" + ID[3:]),
    ("kv_id", ID[:-1] + "\n"),
    ("kv_id", ID + "\n"),
    ("kv_id", "٠" * 64),  # digits, but not ASCII ones
    ("kv_id", ID.encode()),
    ("kv_id", None),
    ("kv_namespace", "g" * 64),
    ("kv_namespace", 5),
    ("kv_tokens", 0),
    ("kv_tokens", -1),
    ("kv_tokens", MAX_TOKENS),
    ("kv_tokens", 7.0),
    ("kv_tokens", True),
    ("kv_tokens", "7"),
    ("kv_exact", 1),
    ("kv_exact", "true"),
    ("kv_exact", None),
    ("kv_label", "x" * (MAX_LABEL_CHARS + 1)),
    ("kv_label", None),
    ("kv_label", "\ud800"),
    ("kv_preview", "x" * (MAX_PREVIEW_CHARS + 1)),
    ("kv_preview", b"bytes"),
    ("kv_preview", "a\udfff"),
]


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS)
def test_a_wrong_field_is_refused_by_name_and_by_both_ways_in(name: str, value: Any) -> None:
    for make in (lambda fields: KVHandle(**fields), KVHandle.coerce):
        with pytest.raises(MalformedHandle, match=name) as caught:
            make({**GOOD, name: value})
        assert len(str(caught.value)) < 200
        str(caught.value).encode()


NOT_HANDLES = [None, 7, "text", ID, b"", [], (ID, NAMESPACE, 7), [GOOD], object(), float("nan"), set()]


@pytest.mark.parametrize("value", NOT_HANDLES, ids=lambda value: repr(value).partition(" at 0x")[0])
def test_what_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(MalformedHandle, match="expected a KVHandle"):
        KVHandle.coerce(value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"kv_id": ID},
        {k: v for k, v in GOOD.items() if k != "kv_tokens"},
        {**GOOD, "kv_pointer": 1},
        {**GOOD, 1: 2},
        {"kv_id": ID, "kv_namespace": NAMESPACE, "tokens": 7},
    ],
    ids=repr,
)
def test_a_truncated_or_extended_dict_is_refused_and_told_what_is_wrong(value: Any) -> None:
    with pytest.raises(MalformedHandle, match="missing: .*unknown: "):
        KVHandle.coerce(value)


def test_a_handle_is_coerced_to_itself() -> None:
    handle = KVHandle(**GOOD)
    assert KVHandle.coerce(handle) is handle


@pytest.mark.parametrize("wrap", [dict, UserDict, MappingProxyType, lambda d: json.loads(json.dumps(d))])
def test_any_mapping_of_the_shape_becomes_the_equal_handle(wrap: Any) -> None:
    handle = KVHandle(**GOOD, kv_exact=False, kv_label="docs", kv_preview="The capital … Berlin.")
    back = KVHandle.coerce(wrap(handle.to_dict()))
    assert type(back) is KVHandle
    assert back == handle
    assert back.to_dict() == handle.to_dict()


def test_defaults_may_be_left_out() -> None:
    assert KVHandle.coerce(GOOD) == KVHandle(**GOOD)
    assert KVHandle.coerce(GOOD).kv_exact is True


def test_equality_and_hash_are_about_the_kv_only() -> None:
    handle = KVHandle(**GOOD, kv_label="one", kv_preview="first")
    same = KVHandle(**GOOD, kv_label="other")
    assert handle == same
    assert hash(handle) == hash(same)
    assert {handle: 1}[same] == 1
    for change in ({"kv_id": "0" * 64}, {"kv_namespace": "0" * 64}, {"kv_tokens": 8}, {"kv_exact": False}):
        assert dataclasses.replace(handle, **change) != handle
    assert handle != handle.to_dict()


def test_a_handle_is_immutable_and_always_truthy() -> None:
    """deer-flow#3011: falsy values are dropped by flush loops, so a handle has neither length nor truth of its own."""
    handle = KVHandle(**GOOD)
    with pytest.raises(dataclasses.FrozenInstanceError):
        handle.kv_tokens = 9  # type: ignore[misc]
    assert bool(handle)
    assert "__len__" not in dir(handle)
    assert "__bool__" not in dir(handle)
    assert not hasattr(handle, "__dict__")


def test_every_field_is_a_json_scalar() -> None:
    assert all(type(value) in (str, int, bool) for value in KVHandle(**GOOD).to_dict().values())
    assert [field.name for field in dataclasses.fields(KVHandle) if not field.init] == []
    assert all(field.name.startswith("kv_") for field in dataclasses.fields(KVHandle))


@pytest.mark.parametrize("filler", ["x", "é", "漢", "🜁"])
def test_the_largest_handle_is_under_a_kilobyte(filler: str) -> None:
    handle = KVHandle(ID, NAMESPACE, MAX_TOKENS - 1, False, filler * MAX_LABEL_CHARS, filler * MAX_PREVIEW_CHARS)
    assert len(json.dumps(handle.to_dict(), ensure_ascii=False).encode()) < 1024


def test_a_handle_survives_copy_and_process_borders() -> None:
    handle = KVHandle(**GOOD, kv_label="docs")
    assert pickle.loads(pickle.dumps(handle)).to_dict() == handle.to_dict()


def test_the_error_is_a_value_error_that_langgraph_does_not_retry() -> None:
    assert issubclass(MalformedHandle, UsageError)
    assert issubclass(MalformedHandle, ValueError)
    assert MalformedHandle.recovery == "fail"


@given(st.text(max_size=400))
def test_a_preview_always_fits_and_prints_on_one_line(text: str) -> None:
    preview = make_preview(text)
    assert len(preview) <= MAX_PREVIEW_CHARS
    assert preview.isprintable()
    KVHandle(**GOOD, kv_preview=preview)


def test_a_preview_shows_the_first_and_the_last_words() -> None:
    assert make_preview("short  text\n\there") == "short text here"
    long = make_preview("begin " + "middle " * 100 + "end")
    assert long.startswith("begin middle")
    assert long.endswith("middle end")
    assert "…" in long


@given(
    st.dictionaries(
        st.sampled_from([*GOOD, "kv_exact", "kv_label", "kv_preview", "x"]),
        st.none() | st.text() | st.integers() | st.booleans(),
    )
)
def test_coerce_returns_a_handle_or_raises_its_own_error_only(value: dict[str, Any]) -> None:
    with contextlib.suppress(MalformedHandle):
        assert isinstance(KVHandle.coerce(value), KVHandle)
