"""Attention of several requests at once: every extent that some of them share is read once, for all of them.

    out = merge over extents of flash(queries of all its readers, K_extent, V_extent), and over each request's own tail

Readers of one extent are folded into the query axis (Hydragen, arXiv 2402.05099), extent by extent, so the requests may share
a tree or a forest. What is left of the tails, less than a block each, lies side by side in one buffer and is read by one call;
whole blocks of a tail that has grown longer are read like an extent with one reader. A request with many more new tokens than
the others (a prefill among streams) would pad that buffer for all: its new tokens attend to each other in a call of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from aaflow_langgraph.engine.attention import Past, flash
from aaflow_langgraph.model import BLOCK_TOKENS

KEPT_BYTES = 128 << 20
"""A buffer for tails of at most this size is kept from one forward to the next: fresh pages cost more than the copy."""


_Layers = list[tuple[torch.Tensor, ...]]


class TailRoom:
    """Memory for the ends of tails, used by one forward at a time."""

    def __init__(self) -> None:
        self._kept: torch.Tensor | None = None

    def take(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A tensor of this shape that holds finite numbers only; what they are is left over from before."""
        count = torch.Size(shape).numel()
        if count * like.itemsize > KEPT_BYTES:
            return like.new_zeros(shape)
        if self._kept is None or self._kept.numel() < count:
            self._kept = like.new_zeros(count * 3 // 2)  # tails grow by a token a step
        return self._kept[:count].view(shape)


class SharedPast:
    """What the layers of one forward over several requests attend to, and where they write. Lives for one forward.

    Rows are the new tokens of all requests, one after the other.
    """

    layer = -1

    def __init__(self, pasts: Sequence[Past], counts: Sequence[int], room: TailRoom) -> None:
        num_rows = sum(counts)
        # Padding all to the longest must not double the work.
        is_long = [count * len(counts) > 2 * num_rows for count in counts]
        readers: dict[int, dict[int, tuple[_Layers, list[int]]]] = {}
        short: list[tuple[Past, int, range]] = []
        self._long: list[tuple[Past, range]] = []
        at = 0
        for past, count, alone in zip(pasts, counts, is_long, strict=True):
            past.make_room(count)
            rows = range(at, at + count)
            at += count
            whole = past.tail.length if alone else past.tail.length // BLOCK_TOKENS * BLOCK_TOKENS
            for piece in past.pieces(whole):
                keys = piece[0][0]
                readers.setdefault(keys.data_ptr(), {}).setdefault(keys.shape[2], (piece, []))[1].extend(rows)
            if alone:
                self._long.append((past, rows))
            else:
                short.append((past, whole, rows))
        self._groups = [
            (piece, None if len(rows) == num_rows else torch.tensor(rows, device="cpu"))
            for by_length in readers.values()
            for piece, rows in _in_common(by_length)
        ]
        self._short = [(past, rows) for past, _, rows in short]
        self._short_rows = (
            torch.tensor([row for _, rows in self._short for row in rows], device="cpu") if self._long else None
        )
        self._most = 0
        if short:
            self._lay_out(short, room)

    def _lay_out(self, short: Sequence[tuple[Past, int, range]], room: TailRoom) -> None:
        """Copy the rests of the tails side by side, padded to the longest: under a block and the new tokens each."""
        first = short[0][0].tail.kv
        num_layers, _, num_heads, _, dim = first.shape
        counts = [len(rows) for _, _, rows in short]
        rests = [past.tail.length - whole for past, whole, _ in short]
        self._most = max(counts)
        length = max(rest + count for rest, count in zip(rests, counts, strict=True))
        self._tails = room.take((num_layers, 2, len(short), num_heads, length, dim), first)
        self._rests = rests
        hidden = torch.ones((len(short), 1, self._most, length), dtype=torch.bool, device="cpu")
        where: list[tuple[int, int, int]] = []
        for number, ((past, whole, _), rest, count) in enumerate(zip(short, rests, counts, strict=True)):
            if rest:
                self._tails[:, :, number, :, :rest] = past.tail.kv[..., whole : past.tail.length, :]
            for at in range(self._most):
                hidden[number, 0, at, : rest + min(at, count - 1) + 1] = False
            where += [(number, at, rest + at) for at in range(count)]
        request, row, column = (torch.tensor(x, device="cpu") for x in zip(*where, strict=True))
        self._padded_rows = request * self._most + row
        # Of a layer's buffer as rows of D: those of the new keys and values, [2, rows, H].
        of_head, of_kind = (torch.arange(count, device="cpu") for count in (num_heads, 2))
        planes = (of_kind[:, None] * len(short) + request)[..., None] * num_heads + of_head
        self._slots = (planes * length + column[:, None]).reshape(-1)
        self._mask = torch.zeros(hidden.shape, dtype=first.dtype, device="cpu").masked_fill_(hidden, float("-inf"))

    def write(self, layer: int, keys_values: torch.Tensor) -> None:
        """Keep the new keys and values of a layer, ``[rows, 2, H, D]``, where ``attend`` reads them."""
        for past, rows in self._long:
            past.slots()[layer].copy_(keys_values[rows.start : rows.stop].permute(1, 2, 0, 3))
        if self._most:
            mine = keys_values if self._short_rows is None else keys_values[self._short_rows]
            dim = mine.shape[-1]
            self._tails[layer].view(-1, dim).index_copy_(0, self._slots, mine.transpose(0, 1).reshape(-1, dim))

    def write_layer(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """``write`` for ``[1, H, rows, D]`` each, as modules hand them to their cache."""
        self.layer = layer
        self.write(layer, torch.stack((keys[0], values[0])).permute(2, 0, 1, 3))

    def finish(self) -> None:
        """Store what the short requests wrote behind their tails. Those of long ones have it."""
        if not self._most:
            return
        for number, ((past, rows), rest) in enumerate(zip(self._short, self._rests, strict=True)):
            at = past.tail.length
            past.tail.kv[..., at : at + len(rows), :] = self._tails[:, :, number, :, rest : rest + len(rows)]

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """``query [rows, Hq, D]``, each over everything up to itself; ``[rows, Hq * D]`` in the query's dtype."""
        num_rows, num_heads, dim = query.shape
        out, lse = self._over_own(layer, query, scale)
        for piece, some in self._groups:
            asked = query if some is None else query[some]
            keys, values = piece[layer]
            other, weight = _over_extent(asked, keys, values, scale)
            if some is None:
                mine = (lse - weight).sigmoid_()
                out = other.lerp_(out, mine.unsqueeze(-1))
                lse = torch.logaddexp(lse, weight)
            else:
                before, old = out[some], lse[some]
                mine = (old - weight).sigmoid_()
                out[some] = other.lerp_(before, mine.unsqueeze(-1))
                lse[some] = torch.logaddexp(old, weight)
        return out.to(query.dtype).reshape(num_rows, num_heads * dim)

    def _over_own(self, layer: int, query: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what no extent holds, causally: ``[rows, Hq, D]`` and ``[rows, Hq]``, fp32."""
        if not self._long:
            return self._over_tails(layer, query, scale)
        out = query.new_empty(query.shape, dtype=torch.float32)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        for past, rows in self._long:
            keys, values = past.slots()[layer].unsqueeze(1).unbind(0)
            mine, weight = flash(query[rows.start : rows.stop].transpose(0, 1)[None], keys, values, scale, causal=True)
            out[rows.start : rows.stop], lse[rows.start : rows.stop] = (
                mine[0].transpose(0, 1),
                weight[0].transpose(0, 1),
            )
        if self._most:
            out[self._short_rows], lse[self._short_rows] = self._over_tails(layer, query[self._short_rows], scale)
        return out, lse

    def _over_tails(self, layer: int, query: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what is in the buffer, for the rows of the short requests: ``[rows, Hq, D]`` and ``[rows, Hq]``, fp32."""
        keys, values = self._tails[layer].unbind(0)
        count, num_kv_heads, length, dim = keys.shape
        num_heads, most = query.shape[1], self._most
        group = num_heads // num_kv_heads
        padded = query
        if most > 1:
            padded = query.new_zeros((count * most, num_heads, dim))
            padded[self._padded_rows] = query
        # The heads that share a KV head are more queries over it: [n, most, Hq, D] -> [n, H, group * most, D].
        folded = (
            padded.view(count, most, num_kv_heads, group, dim)
            .permute(0, 2, 3, 1, 4)
            .reshape(count, num_kv_heads, -1, dim)
        )
        mask = self._mask[:, :, None].expand(-1, -1, group, -1, -1).reshape(count, 1, group * most, length)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
        out = out.view(count, num_kv_heads, group, most, dim).permute(0, 3, 1, 2, 4).reshape(-1, num_heads, dim)
        lse = lse.reshape(count, num_kv_heads, group, most).permute(0, 3, 1, 2).reshape(-1, num_heads)
        if most > 1:
            out, lse = out[self._padded_rows], lse[self._padded_rows]
        return out.float(), lse


def _in_common(by_length: dict[int, tuple[_Layers, list[int]]]) -> Iterator[tuple[_Layers, list[int]]]:
    """One extent's readers by how far they read it: cut where one of them ends, each part once with all who read it."""
    if len(by_length) == 1:
        yield from by_length.values()
        return
    lengths = sorted(by_length)
    longest, _ = by_length[lengths[-1]]
    for start, stop in itertools.pairwise([0, *lengths]):
        rows = [row for length in lengths if length >= stop for row in by_length[length][1]]
        yield [(keys[:, :, start:stop], values[:, :, start:stop]) for keys, values in longest], rows


def _over_extent(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query [rows, Hq, D]`` over all of ``keys, values [1, H, T, D]``: ``[rows, Hq, D]`` and ``[rows, Hq]``, fp32."""
    rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = query.view(rows, num_kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * rows, dim)
    out, lse = flash(folded, keys, values, scale, causal=False)
    out = out.view(num_kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, num_heads, dim).float()
    return out, lse.view(num_kv_heads, group, rows).permute(2, 0, 1).reshape(rows, num_heads)
