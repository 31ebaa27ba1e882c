"""KVComposite: one id for one request, whatever came first; small; back from JSON; nothing malformed gets in."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.composite import RUNGS, ComposePolicy, KVComposite, arranged, coerce_segment, in_order
from aaflow_langgraph.errors import ConfigError, MalformedHandle
from aaflow_langgraph.graph.serde import handle_serializer
from aaflow_langgraph.handle import KVHandle

NAMESPACE, OTHER = "f" * 64, "e" * 64


def handle(digit: int, label: str = "", namespace: str = NAMESPACE) -> KVHandle:
    return KVHandle(f"{digit:x}" * 64, namespace, 100 + digit, kv_label=label, kv_preview=f"text {digit}")


A, B, C = handle(1, "a"), handle(2, "b"), handle(3, "c")
SHAPE = KVComposite.of([A, B, C]).to_dict()


def labels(composite: KVComposite) -> list[str]:
    return [child.kv_label for child in composite.kv_children]


# --- order and identity ---


@given(st.permutations([A, B, C, handle(4), handle(5), handle(6, "b")]))
def test_children_stand_by_label_then_id_whatever_came_first(children: list[KVHandle]) -> None:
    composite = KVComposite.of(children)
    assert composite == KVComposite.of([A, B, C, handle(4), handle(5), handle(6, "b")])
    assert composite.kv_composite_id == KVComposite.of(sorted(children, key=hash)).kv_composite_id
    assert [child.kv_id[0] for child in composite.kv_children] == ["4", "5", "1", "2", "6", "3"]


@given(st.permutations([("1", C), ("2", A), ("3", B), ("4", A)]))
def test_named_children_stand_by_name_each_as_often_as_it_is_named(items: list[tuple[str, KVHandle]]) -> None:
    composite = KVComposite.of(dict(items))
    assert composite.kv_children == (C, A, B, A)
    assert labels(composite) == ["1", "2", "3", "4"]


def test_an_order_puts_names_labels_or_ids_first_and_passes_over_what_is_not_there() -> None:
    assert KVComposite.of([A, B, C], order=["absent", "c", A.kv_id]).kv_children == (C, A, B)
    assert KVComposite.of({"x": A, "y": B, "z": C}, order=("z",)).kv_children == (C, A, B)
    assert KVComposite.of([A, B], order=["b", "a", "b"]).kv_children == (B, A)


def test_equal_handles_without_names_are_one_child_with_the_first_label() -> None:
    renamed = handle(1, "zzz")
    for children in ([renamed, A, B], [B, A, renamed, A]):
        assert KVComposite.of(children).kv_children == (A, B)
        assert labels(KVComposite.of(children)) == ["a", "b"]


def test_the_id_is_one_of_order_and_policy_and_not_of_labels() -> None:
    composite = KVComposite.of([A, B])
    assert KVComposite.of([handle(1, "x"), handle(2, "y")]).kv_composite_id == composite.kv_composite_id
    others = [
        KVComposite.of([A]),
        KVComposite.of([A, B], order=["b"]),
        KVComposite.of({"x": A, "y": B, "z": B}),
        *(KVComposite.of([A, B], rung=rung) for rung in RUNGS if rung != "auto"),
        KVComposite.of([A, B], k=17),
        KVComposite.of([A, B], r=0.16),
        KVComposite.of([A, B], exact=True),
        KVComposite.of([A, B], max_deviation=0.15),
    ]
    assert len({other.kv_composite_id for other in (composite, *others)}) == len(others) + 1
    assert len({composite, *others}) == len(others) + 1


def test_one_number_written_in_two_ways_is_one_policy() -> None:
    assert KVComposite.of([A, B], r=1).kv_composite_id == KVComposite.of([A, B], r=1.0).kv_composite_id
    assert KVComposite.of([A, B], r=-0.0).kv_composite_id == KVComposite.of([A, B], r=0).kv_composite_id
    from_javascript = {**KVComposite.of([A, B], r=1.0, max_deviation=2.0).to_dict(), "kv_r": 1, "kv_max_deviation": 2}
    assert KVComposite.coerce(from_javascript).kv_composite_id == (
        KVComposite.of([A, B], r=1.0, max_deviation=2.0).kv_composite_id
    )


def test_another_process_derives_the_same_id_without_torch() -> None:
    program = (
        "import json, sys; from aaflow_langgraph.composite import KVComposite;"
        "made = KVComposite.coerce(json.loads(sys.argv[1]));"
        "print(made.kv_composite_id, 'torch' in sys.modules)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", program, json.dumps(SHAPE)], capture_output=True, text=True, check=True
    )
    assert finished.stdout.split() == [KVComposite.of([C, A, B]).kv_composite_id, "False"]


def test_an_id_is_what_it_was_in_the_last_release() -> None:
    """Checkpoints hold composites: a changed derivation would make others of them."""
    expected = "19bb320942a5ed7c140c0cf0efee5fcf8cf06bc1fb05dafe8a27cedab562674e"
    assert KVComposite.of([A, B, C], rung="blend", r=0.2).kv_composite_id == expected


# --- there and back ---


def test_a_plain_dict_of_its_shape_becomes_the_composite_again() -> None:
    made = KVComposite.of({"one": A, "two": B}, rung="auto", k=4, max_deviation=0.5)
    for shape in (made.to_dict(), json.loads(json.dumps(made.to_dict()))):
        back = KVComposite.coerce(shape)
        assert back == made
        assert labels(back) == ["one", "two"]
        assert back.kv_children == (A, B)
        assert back.policy == ComposePolicy(rung="auto", k=4, max_deviation=0.5)
    assert KVComposite.coerce(made) is made
    assert coerce_segment(made.to_dict()) == made
    assert coerce_segment(A.to_dict()) == A


@pytest.mark.parametrize("label", ["x" * 64, "文" * 64, "😀" * 64, '"' * 64, "\\\n" * 32, "\x01" * 64])
def test_eight_children_with_the_longest_labels_stay_below_two_kilobytes(label: str) -> None:
    children = [KVHandle(f"{n:x}" * 64, NAMESPACE, 2**31 - 1, False, label, "p" * 80) for n in range(8)]
    made = KVComposite.of(children, k=2**31 - 1, r=1 / 3, max_deviation=1 / 3e-300)
    stored = json.dumps(made.to_dict(), ensure_ascii=False).encode()
    packed = handle_serializer().dumps_typed(made)[1]
    assert max(len(stored), len(packed)) < 2000
    assert KVComposite.coerce(json.loads(stored)).kv_child_labels == made.kv_child_labels
    assert all(label.startswith(kept) and kept for kept in made.kv_child_labels)


def test_children_of_two_namespaces_keep_theirs() -> None:
    foreign = handle(2, "b", OTHER)
    made = KVComposite.coerce(KVComposite.of([A, foreign]).to_dict())
    assert [child.kv_namespace for child in made.kv_children] == [NAMESPACE, OTHER]
    assert KVComposite.of([A, B]).kv_child_namespaces == (NAMESPACE,)


def test_an_approximate_child_stays_approximate() -> None:
    made = KVComposite.of([KVHandle("1" * 64, NAMESPACE, 5, kv_exact=False), B])
    assert [child.kv_exact for child in KVComposite.coerce(made.to_dict()).kv_children] == [False, True]


def test_label_and_preview_tell_people_what_is_joined() -> None:
    made = KVComposite.of([A, B])
    assert made.kv_label == "a + b"
    assert made.kv_preview == "2 segments of 101 + 102 tokens"
    many = KVComposite.of([handle(n, "long label " * 5) for n in range(16)])
    assert len(many.kv_label) == 64
    assert len(many.kv_preview) == 80


def test_it_is_frozen_and_hashable() -> None:
    made = KVComposite.of([A, B])
    assert len({made, KVComposite.of([B, A])}) == 1
    with pytest.raises(AttributeError):
        made.kv_k = 3  # type: ignore[misc]


# --- bad input ---


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"k": -1}, "k must be"),
        ({"k": 1.0}, "k must be"),
        ({"k": True}, "k must be"),
        ({"k": 10**6000}, "k must be"),
        ({"r": -0.01}, "r must be"),
        ({"r": 1.01}, "r must be"),
        ({"r": float("nan")}, "r must be"),
        ({"r": 10**400}, "r must be"),
        ({"r": True}, "r must be"),
        ({"r": "0.1"}, "r must be"),
        ({"rung": "lego"}, "rung must be"),
        ({"rung": None}, "rung must be"),
        ({"rung": []}, "rung must be"),
        ({"exact": 1}, "exact must be"),
        ({"max_deviation": -1}, "max_deviation must be"),
        ({"max_deviation": float("inf")}, "max_deviation must be"),
        ({"max_deviation": 10**400}, "max_deviation must be"),
        ({"exact": True, "rung": "blend"}, "no approximate rung"),
        ({"order": "ab"}, "order must be"),
        ({"order": [1]}, "order must be"),
        ({"order": [""]}, "order must be"),
    ],
)
def test_an_option_that_cannot_be_right_is_a_config_error(option: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        KVComposite.of([A, B], **option)


@pytest.mark.parametrize("children", [[], {}, (), iter(())])
def test_nothing_to_join_is_refused(children: Any) -> None:
    with pytest.raises(MalformedHandle, match="at least one child"):
        KVComposite.of(children)


@pytest.mark.parametrize(
    "children", [A, A.to_dict(), KVComposite.of([A]), SHAPE, "ab", None, 7, [None], ["a"], [A, SHAPE], {"a": None}]
)
def test_what_is_no_collection_of_handles_is_malformed(children: Any) -> None:
    with pytest.raises(MalformedHandle):
        KVComposite.of(children)


@pytest.mark.parametrize("name", ["x" * 65, 7, "\ud800"])
def test_a_name_that_no_label_can_hold_is_a_config_error(name: Any) -> None:
    with pytest.raises(ConfigError, match="label"):
        in_order({name: A})


@pytest.mark.parametrize(
    "change",
    [
        {"kv_child_ids": []},
        {"kv_child_ids": "a" * 64},
        {"kv_child_ids": [A.kv_id, "../../etc/passwd", C.kv_id]},
        {"kv_child_ids": [A.kv_id, B.kv_id]},
        {"kv_child_namespaces": []},
        {"kv_child_namespaces": [NAMESPACE, NAMESPACE]},
        {"kv_child_tokens": [1, 2, 0]},
        {"kv_child_tokens": {"a": 1}},
        {"kv_child_exact": [1, 0, 1]},
        {"kv_child_labels": ["a", "b"]},
        {"kv_child_labels": ["a", "b", "x" * 65]},
        {"kv_k": -1},
        {"kv_r": 2},
        {"kv_rung": "magic"},
        {"kv_exact_only": "yes"},
        {"kv_exact_only": True, "kv_rung": "blend"},
        {"kv_max_deviation": "small"},
        {"kv_composite_id": "0" * 64},
        {7: 7},
    ],
)
def test_a_forged_dict_is_malformed(change: dict[Any, Any]) -> None:
    with pytest.raises(MalformedHandle):
        KVComposite.coerce({**SHAPE, **change})


@pytest.mark.parametrize("missing", ["kv_child_ids", "kv_child_namespaces", "kv_child_tokens"])
def test_a_truncated_dict_is_malformed(missing: str) -> None:
    with pytest.raises(MalformedHandle, match=missing):
        KVComposite.coerce({name: value for name, value in SHAPE.items() if name != missing})


def test_fields_that_may_be_left_out_have_defaults() -> None:
    shape = {name: SHAPE[name] for name in ("kv_child_ids", "kv_child_namespaces", "kv_child_tokens", "kv_exact_only")}
    assert KVComposite.coerce(shape) == KVComposite.of([A, B, C])
    del shape["kv_exact_only"]  # left out, a composite that must be exact would be one that need not
    with pytest.raises(MalformedHandle, match="kv_exact_only"):
        KVComposite.coerce(shape)


def test_options_that_decide_nothing_make_no_other_composite() -> None:
    def id_of(**options: Any) -> str:
        return KVComposite.of([A, B], **options).kv_composite_id

    assert id_of(rung="legolink", r=0.1) == id_of(rung="legolink", r=0.9)
    assert id_of(rung="blend", k=1) == id_of(rung="blend", k=2)
    assert id_of(exact=True, k=1) == id_of(exact=True)
    different = [id_of(), id_of(k=1), id_of(r=0.5), id_of(max_deviation=0.5), id_of(rung="legolink"), id_of(exact=True)]
    assert len(set(different)) == len(different)


def test_of_several_policies_nothing_is_done_that_one_forbids() -> None:
    loose, exact = ComposePolicy(rung="blend", r=0.2), ComposePolicy(exact=True)
    assert loose.stricter([]) == loose
    assert loose.stricter([exact]) == ComposePolicy(exact=True, r=0.2)
    assert loose.stricter([ComposePolicy(max_deviation=0.3)]) == ComposePolicy(r=0.2, max_deviation=0.3)
    limits = [ComposePolicy(max_deviation=limit) for limit in (0.5, 0.1)]
    assert limits[0].stricter(limits[1:]) == limits[1]
    assert ComposePolicy(rung="suffix").stricter(limits) == ComposePolicy(rung="suffix")
    with pytest.raises(ConfigError, match="max_deviation chooses the rung"):
        ComposePolicy(rung="legolink", max_deviation=0.5)


def test_named_handles_stand_beside_bare_ones_without_repeating_them() -> None:
    assert [child.kv_label for child in arranged([("m", B)], [A, B, C])] == ["a", "c", "m"]
