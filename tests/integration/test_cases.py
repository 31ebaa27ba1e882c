"""Faults that people reported of other caches, as tests of the kind. The oracle is always a cold run (I14)."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import pytest
import torch
from langgraph.graph import START, MessagesState, StateGraph
from transformers import DynamicCache, LlamaForCausalLM

from aaflow_langgraph import (
    Generation,
    KVBroker,
    KVChannel,
    KVChatModel,
    KVComposite,
    KVHandle,
    Sampling,
    TransformersEngine,
    Usage,
    prefill_node,
)
from aaflow_langgraph.engine import cache_adapter
from aaflow_langgraph.errors import ConfigError, RecipeMissing, UnsupportedModel
from tests import tiny
from tests.oracle import prose, stock_of
from tests.unit.test_turns import QWEN3, stock

SMALL = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}


def after(broker: KVBroker, handle: KVHandle, **options: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """What is generated behind a handle: five greedy tokens and their log-probabilities."""
    sampling = Sampling(max_tokens=5, logprobs=True)
    result = broker.generate("x", parent=handle, raw=True, sampling=sampling, **options)
    assert result.logprobs is not None
    return result.token_ids, result.logprobs


def equals_cold(broker: KVBroker, handle: KVHandle, **options: Any) -> bool:
    """Tokens equal the stock model's, log-probabilities within 1e-4."""
    token_ids, logprobs = after(broker, handle, **options)
    oracle = stock_of(broker.engine)
    ids = [*broker.token_ids(handle), *broker.engine.frame.encode_text("x", what="x")]
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        expected = oracle.logits(ids).log_softmax(-1)
        if token_id != int(expected.argmax()) or abs(float(expected[token_id]) - logprob) > 1e-4:
            return False
        ids.append(token_id)
    return True


# ---------------------------------------------------------------------- case 1: continuing needs new ids and a handle


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_new_ids_and_a_handle_are_enough_to_continue(kind: str, open_broker: Callable[..., KVBroker]) -> None:
    """transformers PR #47597, #36151, #34232: positions and masks are ours, whichever way the ids come."""
    prompt, suffix = tiny.words(10, seed=1), tiny.words(4, seed=2)
    broker = open_broker(kind, **SMALL)
    handle = broker.materialize(prompt)
    ways = [
        broker.append(handle, suffix),  # suffix only
        broker.materialize(prompt + suffix),  # prompt and suffix
        broker.append(handle, torch.tensor([suffix])),
        broker.append(broker.append(handle, suffix[:1]), suffix[1:]),
    ]
    assert len(set(ways)) == 1
    assert all(equals_cold(broker, way) for way in ways)
    assert equals_cold(broker, handle)


def test_a_mask_is_no_argument_of_anything(open_broker: Callable[..., KVBroker]) -> None:
    """A stale prefill mask, or any: it is refused by name instead of being believed."""
    broker = open_broker("llama", **SMALL)
    handle = broker.materialize([5, 6])
    calls: list[Callable[..., Any]] = [
        lambda **mask: broker.append(handle, [7], **mask),
        lambda **mask: broker.materialize([7], **mask),
        lambda **mask: broker.generate("x", parent=handle, **mask),
    ]
    for call in calls:
        with pytest.raises(TypeError, match="attention_mask"):
            call(attention_mask=torch.ones(1, 3))


def test_three_rows_continue_each_on_its_own(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama", **SMALL)
    rows = torch.tensor([tiny.words(10, seed=n) for n in range(3)])
    with pytest.raises(ConfigError, match="one sequence at a time"):
        broker.materialize(rows)
    handles = [broker.materialize(row) for row in rows]
    assert len(set(handles)) == 3
    assert all(equals_cold(broker, broker.append(handle, tiny.words(4))) for handle in handles)


# ---------------------------------------------------------------------- case 2: pads


def test_rows_of_a_padded_batch_are_stored_without_their_pads_in_any_order(
    open_broker: Callable[..., KVBroker],
) -> None:
    """transformers#18104, unsloth PR #3803: pad slots left in a row move its logits by 0.09."""
    rows = [tiny.words(10, seed=1), tiny.words(14, seed=2)]
    padded = torch.tensor([[0] * 4 + rows[0], rows[1]])
    mask = torch.tensor([[0] * 4 + [1] * 10, [1] * 14]).bool()
    broker = open_broker("llama", **SMALL)
    with pytest.raises(ConfigError, match="without padding"):
        broker.materialize(padded)
    for order in ((0, 1), (1, 0)):
        for number in order:
            handle = broker.materialize(padded[number][mask[number]])
            assert broker.token_ids(handle) == tuple(rows[number])
            assert equals_cold(broker, handle)


# ---------------------------------------------------------------------- case 3: templates that drop reasoning


def thinking_engine() -> TransformersEngine:
    """A model that answers every prompt with ``<think>a</think>b`` and ends its turn; its KV still counts."""
    tokenizer, model = tiny.tokenizer(QWEN3), tiny.model("llama")
    newline, a, b = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "\nab")
    think, close, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "</think>", "<|im_end|>"))
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    embeddings.normal_(0.0, 4.0, generator=torch.Generator().manual_seed(3))
    for last, following in ((newline, think), (think, a), (a, close), (close, b), (b, end)):
        head[following] = embeddings[last] / 8
    return TransformersEngine(model, tokenizer)


def test_reuse_falls_back_to_the_longest_common_prefix_where_a_template_drops_reasoning() -> None:
    """QwenLM/Qwen3#1826, Qwen3.8#48: turn 1 is not a prefix of turn 2; the true matched length is reported."""
    engine = thinking_engine()
    thought = "<think>a</think>b"
    few = Sampling(max_tokens=8)
    with KVBroker.open(engine, pool_bytes=4 << 20) as broker:

        def answers(result: Any, messages: list[tuple[str, str]]) -> None:
            prompt = broker.token_ids(result.handle)[: result.usage.num_context]
            assert prompt == stock(QWEN3, messages, generate=True)
            assert result.token_ids == stock_of(engine).greedy(prompt, 8)
            assert result.text == thought

        question = prose(400) + "\n"
        first = broker.generate(question, sampling=few)
        answers(first, [("user", question)])
        second = broker.generate("two?", parent=first.handle, sampling=few)
        answers(second, [("user", question), ("assistant", thought), ("user", "two?")])
        assert second.usage.reuse == "common-prefix"
        before = broker.token_ids(first.handle)
        after_it = broker.token_ids(second.handle)
        shared = next(n for n, (x, y) in enumerate(zip(before, after_it, strict=False)) if x != y)
        assert second.usage.num_reused == shared
        assert 256 < shared < len(before)
        assert shared % 256  # not only whole blocks
        # What was computed behind a rewritten turn is found again by its own handle.
        prefilled = broker.stats().num_prefilled_tokens
        broker.append(second.handle, tiny.words(3))
        assert broker.stats().num_prefilled_tokens == prefilled + broker.recipe(second.handle).num_pending + 3
        # The handle of turn 2 stands on its own: evict everything, the answer stays.
        broker.evict(second.handle)
        broker.evict(first.handle)
        third = broker.generate("three?", parent=second.handle, sampling=few)
        told = [("user", question), ("assistant", "b"), ("user", "two?"), ("assistant", thought), ("user", "three?")]
        answers(third, told)
        assert broker.check() == []


def test_a_tool_turn_behind_reasoning_equals_cold() -> None:
    """Behind the last question reasoning stays, in the template's own spacing: the rest of the turn is shared."""
    engine = thinking_engine()
    few = Sampling(max_tokens=8)
    with KVBroker.open(engine, pool_bytes=4 << 20) as broker:
        question = prose(400)
        call = broker.generate(question, sampling=few)
        result = broker.generate("sunny", parent=call.handle, role="tool", sampling=few)
        prompt = broker.token_ids(result.handle)[: result.usage.num_context]
        messages = [("user", question), ("assistant", call.text), ("tool", "sunny")]
        assert prompt == stock(QWEN3, messages, generate=True)
        assert result.token_ids == stock_of(engine).greedy(prompt, 8)
        assert result.usage.num_reused >= 256
        assert result.usage.reuse == "common-prefix"


# ---------------------------------------------------------------------- case 4: windows


@pytest.mark.parametrize("more", [1, 3])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_windowed_model_goes_on_from_all_its_tokens(
    more: int, deterministic: bool, open_broker: Callable[..., KVBroker]
) -> None:
    """transformers#37574, PR #40039, #47447: window 8, 16 tokens; nothing is dropped, the window is in the mask."""
    ids = tiny.words(16, seed=1)
    broker = open_broker("mistral", **SMALL)
    handle = broker.materialize(ids, deterministic=deterministic)
    assert [len(record.token_ids) for record in broker._store.index.records()] == [16]
    child = broker.append(handle, tiny.words(more, seed=2), deterministic=deterministic)
    assert equals_cold(broker, child, deterministic=deterministic)
    # Gone and made again from the recipe: nothing was lost with the tensors.
    broker.evict(child)
    broker.evict(handle)
    assert equals_cold(broker, child, deterministic=deterministic)
    assert equals_cold(broker, handle, deterministic=deterministic)


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 12, 15])
def test_a_windowed_model_forks_at_a_shorter_prefix(cut: int, open_broker: Callable[..., KVBroker]) -> None:
    """``crop`` raises there; a prefix is a handle like any other."""
    ids = tiny.words(16, seed=1)
    broker = open_broker("mistral", **SMALL)
    broker.materialize(ids)
    shorter = broker.materialize(ids[:cut])
    assert equals_cold(broker, shorter)
    assert equals_cold(broker, broker.append(shorter, tiny.words(20, seed=3)))


# ---------------------------------------------------------------------- case 6: transformers drifts


class EarlierRelease(LlamaForCausalLM):
    """A model of the releases in which the argument is called ``past_key_values``."""

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        past_key_values: Any = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
    ) -> Any:
        return super().forward(
            input_ids, position_ids=position_ids, use_cache=use_cache, **{THIS_RELEASE: past_key_values}
        )


class ThisRelease(LlamaForCausalLM):
    """As it is, but a class of its own: its modules run, and their cache argument matters."""


class NoCache(LlamaForCausalLM):
    """A model that keeps nothing between calls."""

    def forward(self, input_ids: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


THIS_RELEASE = cache_adapter.cache_keyword(tiny.model("llama"))


def test_the_cache_argument_is_found_under_either_name() -> None:
    """transformers#47433: ``past_key_values`` was renamed to ``cache``; both give the same tokens."""
    models = [kind(tiny.config("llama")).eval() for kind in (EarlierRelease, ThisRelease)]
    assert cache_adapter.cache_keyword(models[0]) == "past_key_values"
    assert THIS_RELEASE in ("cache", "past_key_values")
    results = []
    for model in models:
        model.load_state_dict(tiny.model("llama").state_dict())
        engine = TransformersEngine(model, tiny.tokenizer())
        assert (engine.read_path, engine.lean) == ("fast", None)
        with KVBroker.open(engine, pool_bytes=1 << 20) as broker:
            results.append(after(broker, broker.materialize(tiny.words(30))))
    assert results[0] == results[1]


def test_a_model_without_a_cache_argument_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="neither cache= nor past_key_values="):
        TransformersEngine(NoCache(tiny.config("llama")), tiny.tokenizer())


def test_kv_never_carries_a_gradient(open_broker: Callable[..., KVBroker]) -> None:
    """transformers#48479: a cache made with grad cannot be copied; ours is made without, whoever calls."""
    assert torch.is_grad_enabled()
    broker = open_broker("llama", **SMALL)
    handle = broker.materialize(tiny.words(30))
    (record,) = broker._store.index.records()
    kv = broker._store.piece(record, 0, 30).kv
    assert not kv.requires_grad
    assert kv.grad_fn is None
    copy.deepcopy(kv)
    assert equals_cold(broker, handle)


@pytest.mark.parametrize("make", [cache_adapter.FastLayer, cache_adapter.UniversalLayer])
def test_our_layers_answer_both_releases_questions(make: Any) -> None:
    """One adapter: positions or a length, ``get_max_length`` or ``get_max_cache_shape``; no crop, nothing dropped."""

    def keep(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values

    options = {"is_sliding": True} if make is cache_adapter.UniversalLayer else {}
    layer = make(0, keep, lambda: 7, **options)
    assert layer.get_seq_length() == 7
    assert layer.get_mask_sizes(3) == layer.get_mask_sizes(torch.arange(7, 10)) == (10, 0)
    assert layer.get_max_length() == layer.get_max_cache_shape() == -1
    assert not layer.is_croppable
    keys = torch.ones(1, 2, 3, 4)
    assert layer.update(keys, keys, {"cache_position": None})[0] is keys
    cache = cache_adapter.as_cache([layer])
    assert cache.get_seq_length() == 7


def test_the_models_cache_is_read_for_what_it_is(engines: Callable[..., TransformersEngine]) -> None:
    """Windowed layers are told from full ones by the cache that transformers itself would build."""
    assert cache_adapter.layer_plan(tiny.model("llama")) == [False] * 3
    assert cache_adapter.layer_plan(tiny.model("mistral")) == [True] * 3
    assert cache_adapter.layer_plan(tiny.model("gemma3")) == [True, False, True]
    assert len(DynamicCache(config=tiny.config("gemma3")).layers) == 3


# ---------------------------------------------------------------------- case 8: spans around block borders


@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize("size", [k * 256 + d for k in (1, 2, 3) for d in (-1, 0, 1)])
def test_every_span_around_a_block_border_is_read_right(
    kind: str, size: int, open_broker: Callable[..., KVBroker]
) -> None:
    """LMCache#2206, #5151: lengths k * 256 + {-1, 0, 1}, and a partial hit in the middle of a block."""
    broker = open_broker(kind, **SMALL)
    ids = tiny.words(800, seed=1)
    broker.materialize(ids)
    handle = broker.materialize(ids[:size])
    assert equals_cold(broker, handle)
    # Leaves what is stored in the middle of a block.
    other = broker.materialize(ids[: size - 100] + tiny.words(150, seed=2))
    assert equals_cold(broker, other)
    assert equals_cold(broker, other, deterministic=True)


def test_a_context_of_a_hundred_and_fifty_blocks(open_broker: Callable[..., KVBroker]) -> None:
    """LMCache#2206: in odd pieces, then forked in the middle."""
    broker = open_broker(
        "llama",
        pool_bytes=32 << 20,
        num_hidden_layers=1,
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=40_000,
    )
    model = copy.deepcopy(broker.engine.model)
    model.set_attn_implementation("sdpa")
    ids = tiny.words(150 * 256 + 9, seed=1)
    handle = broker.materialize(ids[:7000])
    for start in range(7000, len(ids), 8000):
        handle = broker.append(handle, ids[start : start + 8000])
    forked = broker.append(broker.materialize(ids[: 77 * 256]), tiny.words(30, seed=2))
    for end in (handle, forked):
        (token_id, *_), (logprob, *_) = after(broker, end)
        context = [*broker.token_ids(end), *broker.engine.frame.encode_text("x", what="x")]
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([context]), use_cache=False, logits_to_keep=1).logits[0, -1]
        assert token_id == int(expected.argmax())
        assert logprob == pytest.approx(float(expected.log_softmax(-1)[token_id]), abs=1e-4)


# ---------------------------------------------------------------------- case 9: nothing left to run


@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 512])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_prompt_that_is_a_whole_hit_leaves_one_token_to_run(
    size: int, deterministic: bool, open_broker: Callable[..., KVBroker]
) -> None:
    """llama.cpp#1585: identical prompt three times, raw; at most n - 1 tokens are reused."""
    broker = open_broker("llama", **SMALL)
    text = prose(size, seed=1)
    ids = broker.engine.frame.encode_text(text, what="x")
    expected = stock_of(broker.engine).greedy(ids, 5)
    broker.materialize(ids)
    for _ in range(3):
        result = broker.generate(text, raw=True, sampling=Sampling(max_tokens=5), deterministic=deterministic)
        assert result.token_ids == expected
        assert result.usage.num_reused <= size - 1
    assert result.usage.num_reused == (size - 1) // 256 * 256 if deterministic else result.usage.num_reused == size - 1


def test_an_identical_chat_prompt_is_answered_twice(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker("llama", **SMALL)
    docs = broker.prefill(prose(300)).handle
    first, second = (broker.generate("Why?", parent=docs, sampling=Sampling(max_tokens=8)) for _ in range(2))
    assert (first.handle, first.token_ids) == (second.handle, second.token_ids)
    assert second.usage.num_reused < second.usage.num_context
    assert broker.stats().num_extents == 2


# ---------------------------------------------------------------------- case 17: misses


def test_lookups_that_find_nothing_leave_nothing_behind(open_broker: Callable[..., KVBroker]) -> None:
    """langgraph#8754."""
    broker = open_broker("llama", **SMALL)
    known = broker.materialize(tiny.words(300))

    def tables() -> dict[str, int]:
        parts = {**vars(broker), **{f"index.{k}": v for k, v in vars(broker._store.index).items()}}
        return {name: len(value) for name, value in parts.items() if isinstance(value, dict | list | set)}

    broker.evict(known)
    before, stats = tables(), broker.stats()
    for number in range(20):
        with pytest.raises(RecipeMissing):
            broker.token_ids(KVHandle(f"{number:064x}", known.kv_namespace, 5))
        receipt = broker.lease(known)  # evicted: nothing to lease
        assert receipt.extent_ids == ()
        broker.release(receipt)
        assert broker.evict(known) == 0
    assert tables() == before
    assert broker.stats() == stats


# ---------------------------------------------------------------------- case 15: loops in turn, values that are never falsy


def test_one_broker_its_nodes_and_its_chat_model_serve_event_loops_in_turn_and_at_once(
    open_broker: Callable[..., KVBroker],
) -> None:
    """langgraph#5790, #4218: an API server runs each graph on a loop of its own, several at a time."""
    broker = open_broker("llama")
    model = KVChatModel(broker, max_tokens=4)

    class State(MessagesState):
        docs: Annotated[KVHandle, KVChannel]

    async def answer(state: State) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("read", prefill_node(broker, "All work and no play. " * 20, writes="docs"))
    builder.add_node("answer", answer)
    builder.add_edge(START, "read")
    builder.add_edge("read", "answer")
    graph = builder.compile()
    given: Any = {"messages": [("user", "Who?")]}

    def on_a_loop_of_its_own(_: int) -> tuple[KVHandle, str]:
        state = asyncio.run(graph.ainvoke(given))
        return state["docs"], state["messages"][-1].content

    first = on_a_loop_of_its_own(0)
    assert on_a_loop_of_its_own(1) == first
    with ThreadPoolExecutor(3) as loops:
        assert set(loops.map(on_a_loop_of_its_own, range(6))) == {first}


@pytest.mark.parametrize("kind", [KVHandle, KVComposite, Usage, Generation])
def test_what_travels_has_neither_length_nor_truth_of_its_own(kind: type) -> None:
    """deer-flow#3011: a loop that flushes what is truthy drops what is not."""
    assert not {"__len__", "__bool__"} & set(dir(kind))
