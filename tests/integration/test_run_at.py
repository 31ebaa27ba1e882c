"""Tokens at chosen positions over mixed KV: what they see, what they write, and what they leave alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aaflow_langgraph.engine import scattered
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.engine.scattered import Rows
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests import tiny
from tests.real import real_cache  # noqa: F401

Engines = Callable[..., TransformersEngine]

# The gemma3-like model's window is larger than every composite here; smaller ones are refused before (test_rotary.py).
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "cohere": {},
    "glm": {},
    "smollm3": {},
    "gemma3": {"sliding_window": 600},
}


def dense(engine: TransformersEngine, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """KV ``[L, 2, H, T, D]`` and the last logits of an ordinary prefill."""
    tail = Rows(torch.zeros(engine.layout.shape(len(ids)), dtype=engine.model.dtype), 0)
    run = engine.start((), tail, grid=None)
    return tail.kv, run.prefill(ids)


def oracle(
    engine: TransformersEngine, ids: Sequence[int], positions: Sequence[int], kv: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """KV and last logits of tokens at ``positions`` over ``kv``, by plain torch around the stock modules.

    The stock model runs *all* tokens of the composite, and in every layer a hook on the attention function replaces the keys and
    values of the positions that are not to be recomputed by the given ones.
    """
    from transformers import AttentionInterface

    model = copy.deepcopy(engine.model)
    fixed = [n for n in range(kv.shape[3]) if n not in set(positions)]
    new = kv.clone()

    def substituted(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **rest: Any
    ) -> tuple[torch.Tensor, None]:
        layer = module.layer_idx
        key, value = key.clone(), value.clone()
        key[0][:, fixed], value[0][:, fixed] = kv[layer, 0][:, fixed], kv[layer, 1][:, fixed]
        new[layer, 0], new[layer, 1] = key[0], value[0]
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = query @ key.transpose(-1, -2) * (rest.get("scaling") or query.shape[-1] ** -0.5)
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
        return (scores.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("test_substituted", substituted)
    model.set_attn_implementation("test_substituted")
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0, positions[-1]]
    return new, logits


def noise(engine: TransformersEngine, num_tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(engine.layout.shape(num_tokens), generator=generator).to(engine.model.dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_all_positions_in_portions_equal_a_dense_prefill(engines: Engines, kind: str) -> None:
    engine = engines(kind, **KINDS[kind])
    ids = tiny.words(540, seed=1)
    kv, logits = dense(engine, ids)
    for pieces_stop, cuts in ((0, [540]), (0, [3, 200, 201, 540]), (150, [151, 540]), (297, [300, 301, 500, 540])):
        cut = pieces_stop // 3
        pieces = [Piece(kv[..., a:b, :], a, b) for a, b in ((0, cut), (cut, pieces_stop)) if b > a]
        rows = torch.full((*kv.shape[:3], 540 - pieces_stop, kv.shape[4]), float("nan"))
        mixed, at = Mixed(pieces, rows, pieces_stop), pieces_stop
        for stop in cuts:
            found = engine.run_at(ids[at:stop], range(at, stop), mixed)
            at = stop
        assert torch.allclose(found, logits, atol=1e-4, rtol=1e-4)
        assert torch.allclose(rows, kv[..., pieces_stop:, :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_scattered_portions_over_exact_rows_change_nothing(engines: Engines, kind: str) -> None:
    """What is recomputed where everything before it is right comes out as it was, whatever lies behind it."""
    engine = engines(kind, **KINDS[kind])
    ids = tiny.words(540, seed=2)
    kv, logits = dense(engine, ids)
    start = 40
    pieces = [Piece(kv[..., :start, :], 0, start)]
    rows = kv[..., start:, :].clone()
    rows[..., 300:, :] = float("nan")
    mixed = Mixed(pieces, rows, start)
    chosen = sorted(random.Random(5).sample(range(start, 340), 90))
    engine.run_at([ids[n] for n in chosen], chosen, mixed)
    rest = sorted({*range(340, 540), *random.Random(6).sample(range(start, 340), 150)})
    found = engine.run_at([ids[n] for n in rest], rest, mixed)
    assert torch.allclose(found, logits, atol=1e-4, rtol=1e-4)
    assert torch.allclose(rows, kv[..., start:, :], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_pieces", [0, 60])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_positions_equal_the_oracle_and_nothing_else_is_written(
    engines: Engines, kind: str, num_pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(kind, **KINDS[kind])
    monkeypatch.setattr(scattered, "MOST_HIDDEN", 400)  # several blocks in a small test
    ids, length = tiny.words(300, seed=3), 300
    kv = noise(engine, length)
    scenes = {
        "scattered": sorted(random.Random(7).sample(range(num_pieces, 280), 60)),
        "runs": [*range(60, 76), *range(140, 156), *range(220, 236), *range(270, 290)],
        "one": [199],
        "neighbours": [100, 101],
        "far apart": [60, 289],
    }
    for name, chosen in scenes.items():
        wanted, logits = oracle(engine, ids, chosen, kv)
        pieces = [Piece(kv[..., :num_pieces, :], 0, num_pieces)] if num_pieces else []
        rows = kv[..., num_pieces:, :].clone()
        rows[..., chosen[-1] + 1 - num_pieces :, :] = float("nan")
        # What is to be computed must not be read before.
        rows[..., [n - num_pieces for n in chosen], :] = float("nan")
        found = engine.run_at([ids[n] for n in chosen], chosen, Mixed(pieces, rows, num_pieces))
        stop = chosen[-1] + 1
        assert torch.allclose(found, logits, atol=1e-4, rtol=1e-4), name
        assert torch.allclose(rows[..., : stop - num_pieces, :], wanted[..., num_pieces:stop, :], atol=1e-4), name
        kept = [n for n in range(num_pieces, stop) if n not in set(chosen)]
        assert torch.equal(rows[..., [n - num_pieces for n in kept], :], kv[..., kept, :]), name
        assert rows[..., stop - num_pieces :, :].isnan().all(), name


@pytest.mark.parametrize("kind", [*KINDS, "one layer"])
def test_the_check_layer_is_layer_one_after_an_exact_layer_zero(engines: Engines, kind: str) -> None:
    engine = engines("llama", num_hidden_layers=1) if kind == "one layer" else engines(kind, **KINDS[kind])
    ids = tiny.words(560, seed=4)
    kv, _logits = dense(engine, ids)
    spoilt = kv.clone()
    spoilt[1:] = noise(engine, 560)[1:]  # layer 0 is right in rows that were moved, later layers are not
    for start, chosen in (
        (0, list(range(560))),
        (40, list(range(40, 560))),
        (40, sorted(random.Random(8).sample(range(40, 560), 300))),
    ):
        pieces = [Piece(spoilt[..., :start, :], 0, start)] if start else []
        rows = spoilt[..., start:, :].clone()
        before = rows.clone()
        keys, values = engine.check_layer([ids[n] for n in chosen], chosen, Mixed(pieces, rows, start))
        layer = min(1, kv.shape[0] - 1)
        assert torch.allclose(keys, kv[layer, 0][:, chosen], atol=1e-4)
        assert torch.allclose(values, kv[layer, 1][:, chosen], atol=1e-4)
        assert torch.equal(rows, before)


def test_unmodified_modules_serve_where_the_lean_forward_does_not(engines: Engines) -> None:
    engine = engines("llama", seed=5)
    ids = tiny.words(300, seed=5)
    kv = noise(engine, 300)
    chosen = sorted(random.Random(9).sample(range(20, 300), 70))
    found = []
    assert engine.lean is not None
    lean = engine.lean
    for forward in (lean, None):
        engine.lean = forward
        rows = kv[..., 20:, :].clone()
        mixed = Mixed([Piece(kv[..., :20, :], 0, 20)], rows, 20)
        checked = engine.check_layer([ids[n] for n in chosen], chosen, mixed)
        found.append((rows, engine.run_at([ids[n] for n in chosen], chosen, mixed), *checked))
    engine.lean = lean
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("positions", [[], [5, 5], [7, 6], [9, 10], [30, 50]])
def test_positions_outside_the_rows_or_out_of_order_are_refused(engines: Engines, positions: list[int]) -> None:
    engine = engines("llama")
    kv = noise(engine, 50)
    mixed = Mixed([Piece(kv[..., :10, :], 0, 10)], kv[..., 10:, :].clone(), 10)
    for call in (engine.run_at, engine.check_layer):
        with pytest.raises(ValueError, match="positions"):
            call([5] * len(positions), positions, mixed)


@pytest.mark.slow
@pytest.mark.usefixtures("real_cache")
def test_on_the_real_model_scattered_portions_of_thousands_of_tokens_stay_near_dense() -> None:
    from aaflow_langgraph.assets import demo_model

    engine = TransformersEngine.load(demo_model(), device="cpu")
    text = "The assembly of the islands meets in spring and decides on fishing rights, harbours and the price of salt. "
    ids = engine.tokenizer(text * 110)["input_ids"][:2400]
    kv, logits = dense(engine, ids)
    rows = kv.clone()
    # Every third token, then all others with garbage in their place.
    thirds = list(range(2, 2400, 3))
    engine.run_at([ids[n] for n in thirds], thirds, Mixed([], rows, 0))
    assert float((rows.float() - kv.float()).norm() / kv.float().norm()) < 0.02
    rows = torch.full_like(kv, float("nan"))
    rows[..., :1000, :] = kv[..., :1000, :]
    last = sorted({*range(0, 1000, 7), *range(1000, 2400)})
    found = engine.run_at([ids[n] for n in last], last, Mixed([], rows, 0))
    assert float((rows.float() - kv.float()).norm() / kv.float().norm()) < 0.02
    assert int(found.argmax()) == int(logits.argmax())
    assert float((found.float() - logits.float()).abs().mean() / logits.float().std()) < 0.15
