"""Attention at scattered rows against plain torch, in every arrangement of blocks and by every kernel."""

from __future__ import annotations

import random

import pytest
import torch

from aaflow_langgraph.engine import attention, scattered
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.scattered import Rows, ScatteredPast


def reference(query: torch.Tensor, kv: torch.Tensor, positions: list[int]) -> torch.Tensor:
    """``query [T, Hq, D]`` at ``positions`` over ``kv [2, H, S, D]``: ``[T, Hq * D]`` in fp32."""
    group = query.shape[1] // kv.shape[1]
    keys, values = kv.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,hkd->hqk", query.float(), keys) * query.shape[-1] ** -0.5
    hidden = torch.arange(kv.shape[2]) > torch.tensor(positions)[:, None]
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,hkd->qhd", weights, values).reshape(len(positions), -1)


@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
@pytest.mark.parametrize("start", [0, 70])
def test_queries_see_all_rows_up_to_their_own(
    start: int, num_kv_heads: int, by_products: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scattered, "prefers_products", lambda _query, _length: by_products)
    monkeypatch.setattr(attention, "prefers_products", lambda _query, _length: by_products)
    dtype = torch.bfloat16 if by_products else torch.float32
    generator = torch.Generator().manual_seed(0)
    for most, last, count in ((32768, 999, 120), (2000, 998, 120), (400, 997, 80), (32768, 400, 30)):
        monkeypatch.setattr(scattered, "MOST_HIDDEN", most)
        some = random.Random(count).sample(range(last - start), count - 20)
        offsets = sorted({*some, *range(200, 230), last - start})
        kv = torch.randn(1, 2, num_kv_heads, 1000, 16, generator=generator).to(dtype)
        query = torch.randn(len(offsets), 3 * num_kv_heads, 16, generator=generator).to(dtype)
        wanted = reference(query, kv[0], [start + offset for offset in offsets])
        rows = kv[..., start:, :].clone()
        new = rows[0][:, :, offsets].clone()
        rows[0][:, :, offsets] = float("nan")
        rows[..., last - start + 1 :, :] = float("nan")
        pieces = [Piece(kv[..., :start, :], 0, start)] if start else []
        past = ScatteredPast(pieces, Rows(rows, start), offsets)
        past.begin(len(offsets))
        past.slots()[0].copy_(new)
        near = {"atol": 2e-2 if by_products else 1e-5, "rtol": 2e-2 if by_products else 1e-5}
        assert torch.allclose(past.attend(0, query, None).float(), wanted, **near)
        assert torch.allclose(past.attend(0, query[-1:], None).float(), wanted[-1:], **near)
        assert torch.equal(rows[0][:, :, offsets], new)


def test_products_hide_what_is_not_seen_whatever_its_scores() -> None:
    """Higher scores of hidden keys do not take the others' precision; where they overflow, the caller is told."""
    generator = torch.Generator().manual_seed(1)
    for heads, length, start in ((3, 1201, 900), (3, 1200, 0), (2, 333, 332), (1, 64, 3)):
        keys, values = (torch.randn(heads, length, 16, generator=generator).bfloat16() for _ in range(2))
        query = torch.randn(heads, 2, 40, 16, generator=generator).bfloat16()
        seen = (torch.rand(40, length - start, generator=generator) < 0.5).bfloat16()
        seen[:, 1::3] = 0
        seen[:, 0] = 1
        keys[:, start + 1 :: 3] *= 8
        out_lse = attention.products(query.reshape(heads, 80, 16), keys, values, 0.25, seen)
        assert out_lse is not None
        scores = torch.einsum("hgqd,hkd->hgqk", query.float(), keys.float()) * 0.25
        scores[..., start:] = scores[..., start:].masked_fill(seen == 0, float("-inf"))
        wanted = scores.softmax(-1) @ values.float()[:, None]
        assert torch.allclose(out_lse[0].view(wanted.shape), wanted, atol=3e-2)
        assert torch.allclose(out_lse[1].view(wanted.shape[:-1]), scores.logsumexp(-1), atol=3e-2)
        if start + 1 < length:
            keys[:, start + 1 :: 3] *= 100
            assert attention.products(query.reshape(heads, 80, 16), keys, values, 0.25, seen) is None


def test_blocks_hide_no_more_than_they_may() -> None:
    offsets = sorted(random.Random(1).sample(range(5000), 256))
    blocks = scattered.cut_blocks(offsets)
    assert [number for a, b in blocks for number in range(a, b)] == list(range(256))
    for a, b in blocks:
        assert sum(offsets[b - 1] - offset for offset in offsets[a:b]) <= scattered.MOST_HIDDEN
    assert 1 < len(blocks) < 32
    assert scattered.cut_blocks(range(100)) == [(0, 100)]
