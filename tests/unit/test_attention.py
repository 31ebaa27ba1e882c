"""Attention over pieces against attention over the whole, in fp64."""

from __future__ import annotations

import pytest
import torch

from aaflow_langgraph.engine.attention import flash, merge, products

HEADS, ROWS, DIM = 3, 48, 64


def reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = query.double() @ keys.double().transpose(-1, -2) * scale
    return scores.softmax(-1) @ values.double(), scores.logsumexp(-1)


def made(length: int, heads: int = HEADS, *, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    query = torch.randn(heads, rows, DIM, generator=generator)
    kv = torch.randn(2, heads, length, DIM, generator=generator)
    return query, kv[0], kv[1]


@pytest.mark.parametrize("cut", [1, 255, 256, 700, 999])
def test_merged_pieces_equal_the_whole(cut: int) -> None:
    query, keys, values = made(1000)
    parts = [
        flash(query[None], keys[None, :, a:b], values[None, :, a:b], 0.125, causal=False)
        for a, b in ((0, cut), (cut, 1000))
    ]
    expected, _ = reference(query, keys, values, 0.125)
    assert (merge(*zip(*parts, strict=True))[0] - expected).abs().max() < 1e-5


def test_three_pieces_merge_like_two() -> None:
    query, keys, values = made(900)
    spans = ((0, 100), (100, 612), (612, 900))
    parts = [flash(query[None], keys[None, :, a:b], values[None, :, a:b], 0.125, causal=False) for a, b in spans]
    expected, _ = reference(query, keys, values, 0.125)
    assert (merge(*zip(*parts, strict=True))[0] - expected).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [ROWS, 96])
@pytest.mark.parametrize("heads", [2, 3])
@pytest.mark.parametrize("length", [1024, 1025, 4099])
@pytest.mark.parametrize("scale", [0.125, 0.0884])
def test_products_are_as_near_to_the_truth_as_bf16_attention_is(
    length: int, heads: int, scale: float, rows: int
) -> None:
    query, keys, values = (x.bfloat16() for x in made(length, heads, rows=rows))
    expected, lse = reference(query, keys, values, scale)
    joined = products(query, keys, values, scale)
    assert joined is not None
    kernel, _ = flash(query[None].float(), keys[None].float(), values[None].float(), scale, causal=False)
    rounding = (kernel.bfloat16()[0] - expected).abs().max()
    assert (joined[0] - expected).abs().max() < 4 * rounding + 2e-3
    assert (joined[1] - lse).abs().max() < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [1023, 1024, 1025, 2047])
@pytest.mark.parametrize("heads", [1, 3])
def test_few_queries_over_many_keys_equal_the_reference(length: int, heads: int, dtype: torch.dtype) -> None:
    query, keys, values = (x.to(dtype) for x in made(length, heads, rows=3))
    # Read in place, as extents are: a head's keys lie far from the next head's.
    room = torch.full((2, heads, length + 5, DIM), float("nan"), dtype=dtype)
    room[0, :, 2 : 2 + length], room[1, :, 2 : 2 + length] = keys, values
    keys, values = room[:, :, 2 : 2 + length].unbind(0)
    out, lse = flash(query[None], keys[None], values[None], 0.125, causal=False)
    expected, expected_lse = reference(query, keys, values, 0.125)
    assert (out[0] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-3)
    assert (lse[0] - expected_lse).abs().max() < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_query_heads_that_share_a_kv_head_attend_causally(dtype: torch.dtype) -> None:
    query, keys, values = (x.to(dtype) for x in made(48, 6))
    keys, values = keys[::3], values[::3]
    out, lse = flash(query[None], keys[None], values[None], 0.125, causal=True)
    hidden = torch.ones(48, 48, dtype=torch.bool).triu(1)
    scores = (query.double() @ keys.double().repeat_interleave(3, 0).transpose(-1, -2) * 0.125).masked_fill(
        hidden, float("-inf")
    )
    expected = scores.softmax(-1) @ values.double().repeat_interleave(3, 0)
    assert (out[0] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)
    assert (lse[0] - scores.logsumexp(-1)).abs().max() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_that_rounds_an_odd_extent_up_has_no_weight(poison: float) -> None:
    query, keys, values = (x.bfloat16() for x in made(2048))
    rows = [torch.zeros(HEADS, 2048, DIM, dtype=torch.bfloat16) for _ in range(2)]
    for row, source in zip(rows, (keys, values), strict=True):
        row[:, :2047] = source[:, :2047]
    rows[0][:, 2047] = poison  # keys there may be anything; values there are zeroed when a tail is made
    odd = products(query, rows[0][:, :2047], rows[1][:, :2047], 0.125)
    copied = products(query, keys[:, :2047].clone(), values[:, :2047].clone(), 0.125)
    assert odd is not None
    assert copied is not None
    assert torch.equal(odd[0], copied[0])
    assert torch.equal(odd[1], copied[1])


def test_scores_far_above_the_sampled_ones_are_left_to_the_flash_kernel() -> None:
    query, keys, values = (x.bfloat16() for x in made(2048))
    keys[:, 1] = query[:, 0] * 40  # not among the sampled keys
    assert products(query, keys, values, 0.125) is None
    out, _ = flash(query[None], keys[None], values[None], 0.125, causal=False)
    expected, _ = reference(query, keys, values, 0.125)
    assert (out[0] - expected).abs().max() < 3e-2
