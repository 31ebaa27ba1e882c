"""Attention of new tokens at scattered positions: the fast read path of composed KV.

    out = merge over (pieces, rows before the block, the block's own stretch of rows) by log-sum-exp

Rows are KV of the positions ``[start, start + n)`` that is there already; new keys and values replace some of it, layer by layer,
and the queries at these positions attend to all rows up to their own. Queries are sorted and cut into blocks of neighbours, so
most of what one of a block sees all of it see, and that is read without a mask; only inside a block's stretch, from its first to
its last position, a mask (or where it has no gaps the causal kernel) tells who sees what. Where large products are faster than
the flash kernel, one pair of them does both.

Knows tensors and positions; knows no model and no segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aaflow_langgraph.engine.attention import FastPathRefused, Past, flash, merge, prefers_products, products
from aaflow_langgraph.engine.base import Piece

MOST_HIDDEN = 32768
"""A block grows until its mask would hide this many query-key pairs: they are computed for nothing, but a further block is a
further call or two and smaller products. Measured on 2 cores with 15 % of 4,096 tokens, about 100 queries a block then: of half and
double the number of queries the former costs 5 % more, the latter 12 %."""


class Rows:
    """The rows as a run's tail: of fixed size, ``length`` of them in front of the tokens of the next forward."""

    def __init__(self, kv: torch.Tensor, start: int) -> None:
        self.kv = kv
        self.start = start
        self.length = 0

    def ensure(self, num_tokens: int) -> None:
        """See ``Tail.ensure``: the rows are all there."""
        if num_tokens > self.kv.shape[3]:
            raise ValueError(f"there are {self.kv.shape[3]} rows, {num_tokens} asked")


@dataclass(frozen=True, slots=True)
class Block:
    """Queries ``[first, last)`` of a chunk; their own keys stand in the rows ``[start, stop)``.

    ``seen [T, stop - start]`` is one where a query attends to a row, else zero, and ``mask`` the same as something to add; both are
    None where there is no gap.
    """

    first: int
    last: int
    start: int
    stop: int
    seen: torch.Tensor | None
    mask: torch.Tensor | None


class ScatteredPast(Past):
    """What the layers of one forward at ``offsets`` (rows, strictly ascending, at least two) attend to and write."""

    __slots__ = ("_blocks", "_offsets", "_stage", "_where")

    def __init__(self, pieces: Sequence[Piece], rows: Rows, offsets: Sequence[int]) -> None:
        super().__init__(pieces, rows, None)
        kv = rows.kv
        self.num_new = len(offsets)
        self._offsets = offsets
        self._where = torch.tensor(offsets, device=kv.device)
        self._blocks: list[Block] = []
        self._stage: torch.Tensor | None = None

    def begin(self, num_new: int) -> None:
        """What is read was fixed with the offsets."""
        self.make_room(num_new)
        offsets, dtype = self._offsets, self.tail.kv.dtype
        self._blocks = [_block(self._where, a, b, dtype) for a, b in cut_blocks(offsets)]

    def make_room(self, num_new: int) -> None:
        """The rows are all there."""
        if num_new != self.num_new:
            raise FastPathRefused(f"{num_new} tokens for {self.num_new} positions")

    def places(self, num_new: int) -> Sequence[int]:
        """See ``Past.places``."""
        return self._offsets

    def slots(self) -> tuple[torch.Tensor, ...]:
        """One room for the new keys and values of every layer in turn: ``attend`` moves them to their rows."""
        num_layers, _two, num_heads, _rows, dim = self.tail.kv.shape
        self._stage = self.tail.kv.new_empty(2, num_heads, self.num_new, dim)
        return (self._stage,) * num_layers

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the new keys and values (``[1, H, T, D]``) of ``layer`` into their rows."""
        if keys.shape[0] != 1:
            raise FastPathRefused(f"batch of {keys.shape[0]}; runs are one sequence each")
        self.tail.kv[layer, 0].index_copy_(1, self._where, keys[0])
        self.tail.kv[layer, 1].index_copy_(1, self._where, values[0])
        self.layer = layer

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """See ``Past.attend``: ``query [T, Hq, D]`` of all new tokens, or ``[1, Hq, D]`` of the last."""
        rows = self.tail.kv[layer]
        if self._stage is not None:
            rows.index_copy_(2, self._where, self._stage)
        num_queries, num_heads, dim = query.shape
        num_kv_heads = rows.shape[1]
        group = num_heads // num_kv_heads
        keys, values = rows.unsqueeze(1).unbind(0)
        if num_queries == 1:
            stop = self._blocks[-1].stop
            folded = query.view(1, num_kv_heads, group, dim)
            reads = [(*kv[layer],) for kv in self._pieces] + [(_until(keys, stop), _until(values, stop))]
            joined = merge(*zip(*(flash(folded, k, v, scale, causal=False) for k, v in reads), strict=True))
            return joined.to(query.dtype).reshape(1, num_heads * dim)
        # [T, Hq, D] -> [H, group, T, D]
        by_head = query.view(num_queries, num_kv_heads, group, dim).permute(1, 2, 0, 3)
        before = [_fold(by_head, kv[layer][0], kv[layer][1], scale) for kv in self._reads]
        result = query.new_empty(num_queries, num_heads * dim)
        by_row = result.view(num_queries, num_kv_heads, group, dim)
        for block in self._blocks:
            a, b = block.first, block.last
            asked = by_head[:, :, a:b]
            parts = [(out[:, :, a:b], lse[:, :, a:b]) for out, lse in before]
            parts += self._over_rows(block, asked, query[a:b], keys, values, scale)
            by_row[a:b] = merge(*zip(*parts, strict=True)).permute(2, 0, 1, 3)
        return result

    def _over_rows(
        self,
        block: Block,
        asked: torch.Tensor,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float | None,
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """A block's queries, ``asked [H, group, T, D]`` and again as ``query [T, Hq, D]``, over the rows up to their own."""
        num_kv_heads, group, num_queries, dim = asked.shape
        start, stop = block.start, block.stop
        folded = asked.reshape(1, num_kv_heads, group * num_queries, dim)
        on_cpu, many = query.device.type == "cpu", group * num_queries > 64
        if block.seen is not None and on_cpu and many and prefers_products(folded, stop):
            whole = products(folded[0], _until(keys, stop)[0], _until(values, stop)[0], scale or dim**-0.5, block.seen)
            if whole is not None:
                return [(whole[0].view(asked.shape), whole[1].view(asked.shape[:-1]))]
        own = slice(start, stop)
        out, lse = _stretch(query.transpose(0, 1)[None], keys[:, :, own], values[:, :, own], scale, block.mask)
        parts = [(out.view(asked.shape), lse.view(asked.shape[:-1]))]
        if start:
            parts.append(_fold(asked, keys[:, :, :start], values[:, :, :start], scale))
        return parts


def cut_blocks(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending ``offsets`` as spans ``[first, last)`` in which at most ``MOST_HIDDEN`` query-key pairs are hidden."""
    cuts, hidden = [0], 0
    for number in range(1, len(offsets)):
        # One position more hides the stretch up to it from every query before.
        hidden += (number - cuts[-1]) * (offsets[number] - offsets[number - 1])
        if hidden > MOST_HIDDEN:
            cuts.append(number)
            hidden = 0
    return list(zip(cuts, [*cuts[1:], len(offsets)], strict=True))


def _block(where: torch.Tensor, first: int, last: int, dtype: torch.dtype) -> Block:
    """The block of the queries ``[first, last)`` of those at the rows ``where``."""
    where = where[first:last]
    start, stop = int(where[0]), int(where[-1]) + 1
    if stop - start == len(where):
        return Block(first, last, start, stop, None, None)
    hidden = torch.arange(start, stop, device=where.device) > where[:, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=where.device).masked_fill_(hidden, float("-inf"))[None, None]
    return Block(first, last, start, stop, hidden.logical_not().to(dtype), mask)


def _until(tensor: torch.Tensor, stop: int) -> torch.Tensor:
    """The rows before ``stop`` of ``[1, H, n, D]``. Products look one row further where that makes an odd length even (with no
    weight, but nothing times NaN is NaN), and here that row may hold anything: a copy then.
    """
    part = tensor[:, :, :stop]
    return part.clone() if stop % 2 and tensor.stride(1) == (stop + 1) * tensor.shape[3] else part


def _fold(
    asked: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``asked [H, group, T, D]`` over all of ``keys, values [1, H, S, D]``; with log-sum-exp ``[H, group, T]``."""
    num_kv_heads, group, rows, dim = asked.shape
    out, lse = flash(asked.reshape(1, num_kv_heads, group * rows, dim), keys, values, scale, causal=False)
    return out.view(asked.shape), lse.view(asked.shape[:-1])


def _stretch(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query [1, Hq, T, D]`` over its own stretch: causally, or where ``mask`` allows."""
    if mask is None:
        return flash(query, keys, values, scale, causal=True)
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        return out, lse
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1).float(), values.repeat_interleave(group, dim=1).float()
    scores = torch.matmul(query.float(), keys.transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5) + mask
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse.unsqueeze(-1)).exp(), values).to(query.dtype), lse
