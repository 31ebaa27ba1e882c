"""Compose: every rung against the dense forward, on every kind of rotary model, over eviction, nesting and restarts."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aaflow_langgraph import KVBroker, KVHandle, Sampling
from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import (
    Cancelled,
    ConfigError,
    ContextTooLong,
    IncompatibleHandle,
    MalformedHandle,
    NotComposable,
)
from aaflow_langgraph.model import Recipe
from tests import tiny
from tests.oracle import prose, stock_of

Open = Callable[..., KVBroker]
FEW = Sampling(max_tokens=6)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3": {"sliding_window": 1024},
    "phi": {},
    "cohere": {},
}


def documents(broker: KVBroker, lengths: tuple[int, ...] = (200, 300, 77, 130)) -> list[KVHandle]:
    """Documents encoded apart, labelled."""
    return [broker.prefill(prose(length, seed=seed), label=f"doc{seed}").handle for seed, length in enumerate(lengths)]


def logits_behind(broker: KVBroker, handle: KVHandle) -> torch.Tensor:
    return broker.first_logits(handle, [9]).float()


def dense_logits(broker: KVBroker, handle: KVHandle) -> torch.Tensor:
    return stock_of(broker.engine).logits((*broker.token_ids(handle), 9)).float()


@pytest.fixture(params=sorted(KINDS))
def broker(request: pytest.FixtureRequest, open_broker: Open) -> KVBroker:
    return open_broker(request.param, **KINDS[request.param])


# ---------------------------------------------------------------- the rungs


@pytest.mark.parametrize("options", [{"rung": "legolink", "k": 1000}, {"rung": "blend", "r": 1.0}])
def test_recomputing_everything_equals_the_dense_forward(broker: KVBroker, options: dict[str, Any]) -> None:
    composed = broker.compose(documents(broker), **options)
    assert composed.report.num_recomputed == composed.handle.kv_tokens - composed.report.num_shared
    assert torch.allclose(logits_behind(broker, composed.handle), dense_logits(broker, composed.handle), atol=1e-4)


def test_recomputing_nothing_is_the_same_by_every_rung_and_is_not_dense(broker: KVBroker) -> None:
    docs = documents(broker)
    lego = broker.compose(docs, rung="legolink", k=0)
    blend = broker.compose(docs, rung="blend", r=0.0)
    assert lego.report.num_recomputed == blend.report.num_recomputed == 0
    assert torch.equal(kv_of(broker, lego.handle), kv_of(broker, blend.handle))
    distance = (logits_behind(broker, lego.handle) - dense_logits(broker, lego.handle)).abs().max()
    assert distance > 1e-3


def kv_of(broker: KVBroker, handle: KVHandle) -> torch.Tensor:
    """All KV of a handle, ``[L, 2, H, T, D]``, as it lies in the pool."""
    recipe = broker.recipe(handle)
    store, recipes = broker._store, broker._recipes
    match = store.match(recipes.sequence(recipe.kv_id), recipe.stop, borders=recipes.borders(recipe))
    try:
        assert match.stop == recipe.stop
        return torch.cat([store.piece(*part).kv for part in match.parts], 3).clone()
    finally:
        store.release(match.receipt)


def test_moved_keys_are_those_of_the_document_encoded_at_its_new_place(broker: KVBroker) -> None:
    """Layer 0 needs no context, so there the whole composite is right; values of moved tokens are bit by bit as they were."""
    first, second = documents(broker, (200, 300))
    composed = broker.compose([first, second], rung="legolink", k=0)
    exact = broker.compose([first, second], exact=True)
    moved, right = kv_of(broker, composed.handle), kv_of(broker, exact.handle)
    assert torch.allclose(moved[0], right[0], rtol=1e-5, atol=1e-5 * float(right[0].abs().max()))
    length = second.kv_tokens - (first.kv_tokens - 200)
    assert torch.equal(moved[:, 1, :, -length:], kv_of(broker, second)[:, 1, :, -length:])


def test_an_exact_composite_is_the_ordinary_handle_of_its_tokens(broker: KVBroker) -> None:
    docs = documents(broker)
    composed = broker.compose(docs, exact=True)
    assert composed.report.rung == "suffix"
    assert composed.report.exact
    assert composed.handle.kv_exact
    assert composed.handle == broker.materialize(broker.token_ids(composed.handle))
    assert torch.allclose(logits_behind(broker, composed.handle), dense_logits(broker, composed.handle), atol=1e-4)
    again = broker.compose(docs, exact=True)
    assert (again.report.rung, again.report.num_recomputed) == ("prefix", 0)
    assert broker.compose(docs, rung="prefix").handle == composed.handle
    dense = broker.compose(docs, rung="dense")
    assert dense.handle == composed.handle
    assert dense.report.num_recomputed == dense.handle.kv_tokens


def test_an_exact_and_deterministic_composite_is_bit_equal_to_a_run_without_any_cache(
    engines: Callable[..., TransformersEngine],
) -> None:
    found = []
    for warm in (True, False):
        with KVBroker.open(engines("llama"), pool_bytes=16 << 20) as broker:
            if warm:
                docs = documents(broker)
                broker.compose(docs)  # an approximate one of the same tokens is near, and must not be read
                composed = broker.compose(docs, exact=True, deterministic=True).handle
                ids = broker.token_ids(composed)
            else:
                assert broker.materialize(ids, deterministic=True) == composed
            answer = broker.complete((*ids, 9), sampling=FEW, deterministic=True)
            found.append((answer.token_ids, kv_of(broker, composed)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def test_the_cheapest_rung_leaves_no_token_above_the_callers_threshold(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    seen = set()
    for limit in (5.0, 1.0, 0.6, 0.0):
        report = broker.compose(docs, max_deviation=limit).report
        assert report.deviation_max <= limit
        assert report.deviation_share == 0
        assert set(report.predicted_s) == {"legolink", "blend", "suffix", "dense"}
        seen.add((report.rung, report.k))
    assert ("legolink", 0) in seen
    assert any(rung in ("blend", "suffix") for rung, _ in seen)


def test_an_audit_tells_what_the_moved_kv_is_worth(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    exact = broker.compose(docs, rung="legolink", k=1000, audit=True).report.audit
    plain = broker.compose(docs, rung="legolink", k=0, audit=True).report.audit
    assert exact is not None
    assert plain is not None
    assert exact.kl < 1e-8
    assert exact.top1
    assert plain.kl > exact.kl
    # Another text's KV, zeroes and noise are all farther from the truth than what was moved.
    assert min(plain.kl_control_other, plain.kl_control_zeroed, plain.kl_control_random) > plain.kl


# ---------------------------------------------------------------- identity


def test_a_composite_never_answers_an_exact_lookup(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    composed = broker.compose(docs)
    ids = broker.token_ids(composed.handle)
    assert not composed.handle.kv_exact
    exact = broker.materialize(ids)
    assert exact.kv_id != composed.handle.kv_id
    assert broker.journal.entries()[-1].num_nearest == composed.report.num_shared
    assert torch.allclose(logits_behind(broker, exact), dense_logits(broker, exact), atol=1e-4)
    assert broker.nearest(ids).kv_id == exact.kv_id


def test_the_same_segments_under_the_same_policy_are_one_composite_in_any_order_of_arrival(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker, (40, 50, 60))
    ids = {broker.compose(KVComposite.of(order)).handle.kv_id for order in itertools.permutations(docs)}
    assert len(ids) == 1
    assert broker.compose(docs, rung="legolink", k=3).handle.kv_id not in ids
    assert broker.compose(docs[::-1]).handle.kv_id not in ids


def test_another_process_gives_the_same_composite_the_same_id(engines: Callable[..., TransformersEngine]) -> None:
    ids = []
    for _ in range(2):
        with KVBroker.open(engines("llama"), pool_bytes=16 << 20) as broker:
            ids.append(broker.compose(documents(broker)).handle.kv_id)
    assert ids[0] == ids[1]


# ---------------------------------------------------------------- what is joined


def test_children_of_one_parent_share_it_and_it_is_not_repeated(open_broker: Open) -> None:
    broker = open_broker("llama")
    base = broker.prefill(prose(300)).handle
    left = broker.prefill("the left branch. ", parent=base).handle
    right = broker.prefill("the right branch. ", parent=base).handle
    before = broker.stats().pool_used_bytes
    composed = broker.compose([left, right], rung="legolink", k=0)
    text = broker.engine.frame.spell(broker.token_ids(composed.handle))
    assert text.count(prose(300)) == 1
    assert text.endswith("the left branch. \n\nthe right branch. ")
    grown = broker.stats().pool_used_bytes - before
    assert grown <= broker.engine.layout.num_bytes(22)


def test_branches_that_end_with_an_answer_keep_the_templates_frame(open_broker: Open) -> None:
    broker = open_broker("llama")
    base = broker.prefill(prose(100)).handle
    left = broker.generate("left?", parent=base, sampling=FEW)
    right = broker.generate("right?", parent=base, sampling=FEW)
    composed = broker.compose([left.handle, right.handle], rung="legolink", k=1000)
    frame = broker.engine.frame
    assert frame.spell(broker.token_ids(composed.handle)) == tiny_chat(
        [
            ("user", f"{prose(100)}\n\nleft?"),
            ("assistant", frame.spell(left.token_ids)),
            ("user", "\n\nright?"),
            ("assistant", frame.spell(right.token_ids)),
        ]
    )
    assert [turn.role for turn in broker.recipe(composed.handle).turns] == ["user", "assistant"] * 2
    # A token of the frame that was run twice is one token.
    for options in ({"rung": "blend", "r": 1.0}, {"max_deviation": 0.0}):
        report = broker.compose([left.handle, right.handle], **options).report  # type: ignore[arg-type]
        assert report.num_recomputed == report.num_tokens - report.num_shared
    assert torch.allclose(logits_behind(broker, composed.handle), dense_logits(broker, composed.handle), atol=1e-4)


def tiny_chat(turns: list[tuple[str, str]]) -> str:
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns)


def test_branches_with_an_answer_can_be_joined_again_in_another_way(open_broker: Open) -> None:
    """The first join computed the first branch's last tokens, so the second finds nothing left to compute in front of it."""
    broker = open_broker("llama")
    base = broker.prefill(prose(100)).handle
    branches = [broker.generate(ask, parent=base, sampling=FEW).handle for ask in ("left?", "right?")]
    composed = [broker.compose(branches, rung="legolink", k=k).handle for k in (1000, 999)]
    assert torch.equal(logits_behind(broker, composed[0]), logits_behind(broker, composed[1]))


def test_raw_segments_follow_one_another(open_broker: Open) -> None:
    broker = open_broker("llama")
    segments = [tuple(range(10 * n + 5, 10 * n + 15)) for n in range(3)]
    composed = broker.compose([broker.materialize(ids) for ids in segments])
    assert broker.token_ids(composed.handle) == segments[0] + segments[1] + segments[2]


def test_one_segment_is_itself_and_one_that_another_begins_with_adds_nothing(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = broker.prefill(prose(100)).handle
    plan = broker.generate("plan", parent=docs, sampling=FEW).handle
    assert broker.compose([docs]).handle == docs
    assert broker.compose([docs, plan]).handle == plan
    assert broker.compose([docs]).report.rung == "prefix"
    assert broker.compose([docs], exact=True).handle == docs


def test_what_is_left_out_of_a_join_is_counted(open_broker: Open) -> None:
    broker = open_broker("llama")
    base = broker.prefill(prose(100)).handle
    left, right = (broker.prefill(text, parent=base).handle for text in ("left ", "right "))
    assert broker.compose([left, right]).report.num_left_out == base.kv_tokens
    assert broker.compose([base, left]).report.num_left_out == base.kv_tokens
    assert broker.compose([left, right], exact=True).report.num_left_out == base.kv_tokens


def test_what_was_computed_as_one_is_taken_from_there_under_the_composites_own_name(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    exact = broker.compose(docs, exact=True)
    found = broker.compose(docs)
    assert (found.report.rung, found.report.exact, found.report.num_recomputed) == ("prefix", True, 0)
    assert found.handle.kv_exact
    assert found.handle.kv_id != exact.handle.kv_id
    assert torch.equal(kv_of(broker, found.handle), kv_of(broker, exact.handle))
    for handle in (found.handle, exact.handle, *docs):
        broker.evict(handle)
    assert torch.allclose(logits_behind(broker, found.handle), dense_logits(broker, found.handle), atol=1e-4)


def test_the_beginning_of_a_longer_exact_composite_is_backed_by_kv_of_its_own(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = [broker.prefill(text, raw=True).handle for text in ("alpha " * 8, "bravo one " * 7, "charlie " * 6)]
    broker.compose(docs, exact=True)
    front = broker.compose(docs[:2], exact=True)
    assert (front.report.rung, front.report.num_recomputed) == ("prefix", 0)
    assert broker.transfer(front.handle).num_missing == 0


def test_a_rung_is_named_for_what_was_done(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker, (40, 50))
    for _ in range(2):  # nothing canonical is kept of less than a block
        report = broker.compose(docs, exact=True, deterministic=True).report
        assert (report.rung, report.num_shared) == ("dense", 0)
    report = broker.compose(docs, exact=True).report
    assert report.rung in ("prefix", "suffix")
    assert set(report.predicted_s) == {"legolink", "blend", "suffix", "dense"}
    assert broker.compose(docs, rung="dense", deterministic=True).report.rung == "dense"


def test_a_composite_among_segments_is_never_joined_more_loosely_than_it_asked_for(open_broker: Open) -> None:
    broker = open_broker("llama")
    first, *rest = documents(broker, (40, 50, 60))
    strict = KVComposite.of(rest, exact=True)
    assert broker.compose([first, strict]).report.exact
    assert broker.compose([first, strict], rung="blend").handle.kv_exact


async def test_cancelling_a_compose_stops_it_and_publishes_nothing(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    stop = threading.Event()
    stop.set()
    before = broker.stats().num_extents
    with pytest.raises(Cancelled):
        broker.compose(docs, cancel=stop)
    with pytest.raises(Cancelled):
        await broker.acompose(docs, exact=True, cancel=stop)
    assert broker.stats().num_extents == before
    assert broker.stats().num_leases == 0


def test_a_segment_named_twice_stands_twice(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = broker.prefill("again and ").handle
    composed = broker.compose([docs, docs])
    assert broker.engine.frame.spell(broker.token_ids(composed.handle)).endswith("again and again and ")


def test_a_composite_can_be_continued_forked_and_composed_again(open_broker: Open) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    inner = broker.compose(docs[:2], rung="legolink", k=0).handle
    answer = broker.generate("and now?", parent=inner, sampling=FEW)
    assert not answer.handle.kv_exact
    assert answer.usage.num_reused == inner.kv_tokens
    nested = broker.compose([inner, *docs[2:]], rung="legolink", k=0).handle
    flat = broker.compose(docs, rung="legolink", k=0).handle
    assert nested.kv_id != flat.kv_id
    # Keys are rotated from where they were computed, never from where they had been moved to.
    assert torch.equal(kv_of(broker, nested), kv_of(broker, flat))
    moved = broker.compose([docs[2], inner], rung="legolink", k=0).handle
    other = broker.compose([docs[2], *docs[:2]], rung="legolink", k=0).handle
    assert torch.equal(kv_of(broker, moved), kv_of(broker, other))


def test_the_exact_composition_of_an_approximate_handle_has_its_tokens(open_broker: Open) -> None:
    broker = open_broker("llama")
    composed = broker.compose(documents(broker)).handle
    exact = broker.exact(composed)
    assert exact.kv_exact
    assert broker.token_ids(exact) == broker.token_ids(composed)
    assert broker.recipe(exact).turns == broker.recipe(composed).turns
    assert broker.exact(exact) == exact
    judged = broker.compose([composed], exact=True)
    assert judged.handle == exact
    with pytest.raises(NotComposable, match=r"broker\.exact"):
        broker.generate("x", parent=composed, sampling=FEW, deterministic=True)


# ---------------------------------------------------------------- it lasts


@pytest.mark.parametrize("rung", ["legolink", "blend"])
def test_an_evicted_composite_is_composed_again_with_the_same_result(open_broker: Open, rung: Any) -> None:
    broker = open_broker("llama")
    docs = documents(broker)
    composed = broker.compose(docs, rung=rung).handle
    before, answer = kv_of(broker, composed), broker.generate("ask", parent=composed, sampling=FEW)
    for handle in (answer.handle, composed, *docs):
        broker.evict(handle)
    assert broker.stats().num_extents == 0
    again = broker.generate("ask", parent=composed, sampling=FEW)
    assert again.token_ids == answer.token_ids
    assert again.handle == answer.handle
    assert torch.allclose(kv_of(broker, composed), before, atol=1e-5)
    assert broker.compose(docs, rung=rung).report == broker.compose_report(composed)


def test_a_composite_survives_a_restart_on_disk(engines: Callable[..., TransformersEngine], tmp_path: Path) -> None:
    def run(wipe: bool) -> tuple[Any, Any]:
        with KVBroker.open(engines("llama"), pool_bytes=16 << 20, disk=tmp_path) as broker:
            if wipe:
                broker.evict(handle, tier="disk")
            generation = broker.generate("ask", parent=handle, sampling=FEW)
            report = broker.compose_report(handle)
            assert broker.check() == []
            return generation, report

    with KVBroker.open(engines("llama"), pool_bytes=16 << 20, disk=tmp_path) as first:
        composed = first.compose(documents(first), rung="blend", r=0.2)
        handle = composed.handle
        expected = first.generate("ask", parent=handle, sampling=FEW)
    generation, report = run(wipe=False)
    assert generation.token_ids == expected.token_ids
    assert generation.usage.num_reused >= handle.kv_tokens
    assert report == composed.report
    generation, _ = run(wipe=True)
    assert generation.token_ids == expected.token_ids


def test_in_a_pool_too_small_for_it_a_composite_is_made_beside_the_pool(
    engines: Callable[..., TransformersEngine],
) -> None:
    with KVBroker.open(engines("llama"), pool_bytes=16 << 20) as roomy:
        docs = documents(roomy)
        expected = roomy.generate("ask", parent=roomy.compose(docs).handle, sampling=FEW)
    with KVBroker.open(engines("llama"), pool_bytes=256 << 10) as small:
        docs = documents(small)
        composed = small.compose(docs).handle
        assert small.generate("ask", parent=composed, sampling=FEW).token_ids == expected.token_ids
        assert small.check() == []


def test_without_kv_a_composite_is_its_tokens(engines: Callable[..., TransformersEngine]) -> None:
    with KVBroker.open(engines("llama"), pool_bytes=1 << 20, kv=False) as broker:
        composed = broker.compose(documents(broker))
        assert composed.handle.kv_exact
        assert composed.report.num_recomputed == composed.handle.kv_tokens


# ---------------------------------------------------------------- refusals


def test_a_window_shorter_than_the_composite_is_refused_with_the_layer_or_computed(open_broker: Open) -> None:
    broker = open_broker("mistral")
    docs = documents(broker, (40, 50))
    with pytest.raises(NotComposable, match="layer 0"):
        broker.compose(docs, rung="legolink")
    composed = broker.compose(docs)
    assert composed.handle.kv_exact
    assert "layer 0" in composed.report.gate
    assert torch.allclose(logits_behind(broker, composed.handle), dense_logits(broker, composed.handle), atol=1e-4)


def test_learned_positions_are_refused_or_computed(open_broker: Open) -> None:
    broker = open_broker("gpt2")
    docs = documents(broker, (40, 50))
    with pytest.raises(NotComposable, match="layer"):
        broker.compose(docs, rung="blend")
    assert broker.compose(docs).handle.kv_exact


def test_bad_input_is_said(open_broker: Open, engines: Callable[..., TransformersEngine]) -> None:
    broker = open_broker("llama")
    docs = documents(broker, (20, 30))
    for bad, error, match in (
        ([], NotComposable, "no segment"),
        (docs[0], ConfigError, "list of handles"),
        ("ab", ConfigError, "list of handles"),
        ([docs[0], "x"], MalformedHandle, "expected"),
        ([docs[0], None], MalformedHandle, "expected"),
    ):
        with pytest.raises(error, match=match):
            broker.compose(bad)  # type: ignore[arg-type]
    for options, match in (
        ({"k": -1}, "k must"),
        ({"k": 1.5}, "k must"),
        ({"r": 1.01}, "r must"),
        ({"r": float("nan")}, "r must"),
        ({"rung": "best"}, "rung must"),
        ({"max_deviation": -1}, "max_deviation"),
        ({"exact": True, "rung": "blend"}, "approximate"),
        ({"audit": 1}, "audit"),
        ({"gate": 4}, "gate"),
        ({"rung": "blend", "max_deviation": 0.1}, "chooses the rung"),
        ({"label": "x" * 99}, "label"),
    ):
        with pytest.raises(ConfigError, match=match):
            broker.compose(docs, **options)
    with pytest.raises(NotComposable, match="exact=True"):
        broker.compose(docs, deterministic=True)
    with pytest.raises(NotComposable, match="prefix"):
        broker.compose(docs, rung="prefix")
    with pytest.raises(ConfigError, match="own policy"):
        broker.compose(KVComposite.of(docs), k=3)
    long = broker.materialize([9] * 3000)
    with pytest.raises(ContextTooLong):
        broker.compose([long, broker.materialize([8] * 3000)])
    forged = KVHandle(**{**docs[0].to_dict(), "kv_exact": False})
    with pytest.raises(IncompatibleHandle, match="altered"):
        broker.compose([forged, docs[1]])
    tenant = TransformersEngine(tiny.model("llama"), tiny.tokenizer(), tenant="other")
    for engine in (engines("qwen3"), tenant):
        with KVBroker.open(engine, pool_bytes=1 << 20) as other:
            stranger = other.prefill("stranger").handle
        with pytest.raises(IncompatibleHandle, match="namespace"):
            broker.compose([docs[0], stranger])


def test_a_recipe_of_a_composite_is_checked_where_it_comes_from_outside(open_broker: Open) -> None:
    from aaflow_langgraph.errors import IntegrityError
    from aaflow_langgraph.index._wire import from_recipe, to_recipe
    from aaflow_langgraph.pool._recipe_file import decode, encode

    broker = open_broker("llama")
    recipe: Recipe = broker.recipe(broker.compose(documents(broker)).handle)
    assert decode(encode(recipe)) == recipe
    assert from_recipe(recipe.kv_id, to_recipe(recipe).encode()) == recipe
    text = to_recipe(recipe)
    for old, new in (('"legolink"', '"lego"'), (f'"{recipe.parent}"', '"x"'), (",16,", ',"16",')):
        assert old in text
        with pytest.raises(IntegrityError):
            from_recipe(recipe.kv_id, text.replace(old, new).encode())
