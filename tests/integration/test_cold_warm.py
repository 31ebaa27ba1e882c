"""I14, the oracle of everything: with any handle, the output equals the output of a plain stock forward."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch

from aaflow_langgraph import KVBroker, Sampling, TransformersEngine
from tests import tiny

KINDS = ("llama", "qwen3", "gemma3", "phi", "gpt2", "mistral")


def stock_greedy(engine: TransformersEngine, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of the stock model up to an end of turn, one full forward per token, no cache at all."""
    model = copy.deepcopy(engine.model)
    model.set_attn_implementation("eager")
    out = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            logits = model(input_ids=torch.tensor([out]), use_cache=False).logits[0, -1]
            token_id = int(logits.argmax())
            if token_id in engine.stop_ids:
                break
            out.append(token_id)
    return out[len(ids) :]


def stock_goes_on_with(engine: TransformersEngine, ids: list[int], count: int, new: Sequence[int]) -> bool:
    """Are ``new`` the greedy tokens of the stock model? One full forward over all of them, no cache at all."""
    model = copy.deepcopy(engine.model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*ids, *new]]), use_cache=False).logits[0, len(ids) - 1 :]
    greedy = logits.argmax(dim=-1).tolist()
    ended = len(new) == count or greedy[len(new)] in engine.stop_ids
    return greedy[: len(new)] == list(new) and ended and not engine.stop_ids & set(new)


def generated(broker: KVBroker, ids: list[int], count: int, *, deterministic: bool = False) -> tuple[int, ...]:
    """Tokens that the broker generates behind ``ids``, whatever is cached."""
    *front, last = ids
    handle = broker.materialize(front, deterministic=deterministic) if front else None
    text = broker.engine.frame.decode([last])
    result = broker.generate(
        text, parent=handle, raw=True, sampling=Sampling(max_tokens=count), deterministic=deterministic
    )
    assert broker.token_ids(result.handle)[: len(ids)] == tuple(ids)
    return result.token_ids


def letters(count: int, seed: int = 0) -> list[int]:
    """Ids of printable ASCII bytes: each decodes and encodes to itself."""
    alphabet = tiny.tokenizer().encode("abcdefghijklmnopqrstuvwxyz ,.", add_special_tokens=False)
    generator = torch.Generator().manual_seed(seed)
    return [alphabet[i] for i in torch.randint(0, 26, (count,), generator=generator).tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_generation_behind_a_handle_equals_the_stock_model_without_cache(
    kind: str, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker(kind)
    ids = letters(300, seed=1)
    expected = stock_greedy(broker.engine, ids, 64)
    cold = generated(broker, ids, 64)
    warm = generated(broker, ids, 64)
    assert list(cold) == expected
    assert list(warm) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_logits_behind_pieces_equal_the_stock_logits(kind: str, open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(kind)
    ids = letters(530, seed=2)
    model = copy.deepcopy(broker.engine.model)
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        stock = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    handle = None
    for stop in (1, 5, 255, 256, 257, 400, 511, 512, 513, 529):
        before = broker.token_ids(handle) if handle else ()
        new = ids[len(before) : stop]
        handle = broker.append(handle, new) if handle else broker.materialize(new)
        token = broker.engine.frame.decode([ids[stop]])
        result = broker.generate(token, parent=handle, raw=True, sampling=Sampling(max_tokens=1, logprobs=True))
        assert result.token_ids[0] == int(stock[stop].argmax())
        expected = float(stock[stop].log_softmax(-1).max())
        assert result.logprobs is not None
        assert abs(result.logprobs[0] - expected) < 1e-4


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [1, 200, 256, 300, 511, 512, 700])
def test_deterministic_generation_is_bit_identical_with_and_without_cache(
    kind: str, dtype: torch.dtype, cut: int, open_broker: Callable[..., KVBroker]
) -> None:
    ids = letters(701, seed=3)
    sampling = Sampling(max_tokens=24, logprobs=True)
    last = broker_text(ids[-1])
    cold_broker = open_broker(kind, dtype=dtype)
    front = cold_broker.materialize(ids[:-1], deterministic=True)
    assert cold_broker.evict(front) > 0
    cold = cold_broker.generate(last, parent=front, raw=True, sampling=sampling, deterministic=True)
    assert cold.usage.num_reused == 0

    warm_broker = open_broker(kind, dtype=dtype)
    # Everything around it is cached by other routes: an earlier prefix, decoded tokens, unaligned appends.
    prefix = warm_broker.materialize(ids[:cut])
    if cut < len(ids) - 1:
        warm_broker.generate(broker_text(ids[cut]), parent=prefix, raw=True, sampling=Sampling(max_tokens=40))
        warm_broker.append(prefix, ids[cut:-1])
    handle = warm_broker.materialize(ids[:-1])
    for _ in range(2):
        warm = warm_broker.generate(last, parent=handle, raw=True, sampling=sampling, deterministic=True)
        assert warm.token_ids == cold.token_ids
        assert warm.logprobs == cold.logprobs  # bit for bit
    assert warm.usage.num_reused > 0


def broker_text(token_id: int) -> str:
    """Text of one letter."""
    return tiny.tokenizer().decode([token_id])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_canonical_blocks_rebuilt_from_the_recipe_are_bit_identical(
    dtype: torch.dtype, open_broker: Callable[..., KVBroker]
) -> None:
    broker = open_broker("llama", dtype=dtype)
    handle = broker.materialize(letters(900, seed=4))
    before = [record.checksum for record in broker._store.index.records()]
    broker.evict(handle)
    assert broker._store.index.records() == []
    broker.append(handle, letters(5))
    rebuilt = [record.checksum for record in broker._store.index.records() if record.start == 0]
    assert rebuilt == before


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("size", [255, 256, 257, 511, 512, 513, 4095])
def test_lengths_around_block_borders(kind: str, size: int, open_broker: Callable[..., KVBroker]) -> None:
    """LMCache#2206, #5151: right bytes for every token span."""
    broker = open_broker(kind, max_position_embeddings=8192)
    ids = letters(size, seed=5)
    first = generated(broker, ids, 4)
    assert generated(broker, ids, 4) == first
    half = ids[: size // 2 + 1]
    assert stock_goes_on_with(broker.engine, half, 4, generated(broker, half, 4))
    assert stock_goes_on_with(broker.engine, ids, 4, first)


def test_the_whole_prompt_is_a_hit(open_broker: Callable[..., KVBroker]) -> None:
    """llama.cpp#1585: identical prompt twice, shorter than the cache, one token; at most n - 1 tokens are reused."""
    broker = open_broker("llama")
    ids = letters(512, seed=6)
    text = tiny.tokenizer().decode(ids)
    expected = stock_greedy(broker.engine, ids, 3)
    for _ in range(3):
        result = broker.generate(text, raw=True, sampling=Sampling(max_tokens=3))
        assert list(result.token_ids) == expected
        assert result.usage.num_reused <= len(ids) - 1
    assert result.usage.num_reused > 0
    shorter = broker.generate(text[:300], raw=True, sampling=Sampling(max_tokens=3))
    assert list(shorter.token_ids) == stock_greedy(broker.engine, ids[:300], 3)
    one = broker.generate(text[:1], raw=True, sampling=Sampling(max_tokens=3))
    assert list(one.token_ids) == stock_greedy(broker.engine, ids[:1], 3)
