"""Attention of several requests at once: every extent that some of them share is read once, for all of them.

    out = merge over extents of flash(queries of all its readers, K_extent, V_extent), and over each request's own tail

Readers of one extent are folded into the query axis (Hydragen, arXiv 2402.05099), extent by extent, so the requests may share
a tree or a forest. What is left of the tails, less than a block each, lies side by side in one buffer and is read by one call;
whole blocks of a tail that has grown longer are read like an extent with one reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from aaflow_langgraph.engine.attention import Past, flash
from aaflow_langgraph.model import BLOCK_TOKENS


class SharedPast:
    """What the layers of one forward over several requests attend to, and where they write. Lives for one forward.

    Rows are the new tokens of all requests, one after the other.
    """

    def __init__(self, pasts: Sequence[Past], counts: Sequence[int]) -> None:
        self._slots = []
        self._all_rows = sum(counts)
        first = pasts[0].tail.kv
        readers: dict[tuple[int, int], tuple[list[tuple[torch.Tensor, ...]], list[int]]] = {}
        starts, at = [], 0
        for past, count in zip(pasts, counts, strict=True):
            past.begin(count)
            starts.append(at)
            rows = range(at, at + count)
            whole = past.tail.length // BLOCK_TOKENS * BLOCK_TOKENS
            for piece in past.pieces(whole):
                keys = piece[0][0]
                readers.setdefault((keys.data_ptr(), keys.shape[2]), (piece, []))[1].extend(rows)
            self._slots.append(past.slots())
            at += count
        self._groups = [
            (piece, None if len(rows) == self._all_rows else torch.tensor(rows)) for piece, rows in readers.values()
        ]
        # The rests of the tails, padded to the longest: under a block each.
        rests = [past.tail.length % BLOCK_TOKENS for past in pasts]
        self._most = max(counts)
        length = max(rest + count for rest, count in zip(rests, counts, strict=True))
        self._tails = first.new_zeros((first.shape[0], 2, len(pasts), first.shape[2], length, first.shape[4]))
        hidden = torch.ones((len(pasts), 1, self._most, length), dtype=torch.bool)
        where: list[tuple[int, int, int]] = []
        for number, (past, rest, count) in enumerate(zip(pasts, rests, counts, strict=True)):
            whole = past.tail.length - rest
            self._tails[:, :, number, :, :rest] = past.tail.kv[..., whole : past.tail.length, :]
            for row in range(self._most):
                hidden[number, 0, row, : rest + min(row, count - 1) + 1] = False
            where += [(number, row, rest + row) for row in range(count)]
        self._number, self._row, self._column = (torch.tensor(x) for x in zip(*where, strict=True))
        self._mask = torch.zeros(hidden.shape, dtype=first.dtype).masked_fill_(hidden, float("-inf"))
        self._counts = list(counts)

    def write(self, layer: int, keys_values: torch.Tensor) -> None:
        """Store the new keys and values of a layer, ``[rows, 2, H, D]``, behind every tail."""
        at = 0
        for slots, count in zip(self._slots, self._counts, strict=True):
            slots[layer].copy_(keys_values[at : at + count].permute(1, 2, 0, 3))
            at += count
        tails = self._tails[layer]
        tails[0][self._number, :, self._column] = keys_values[:, 0]
        tails[1][self._number, :, self._column] = keys_values[:, 1]

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """``query [rows, Hq, D]``, each over everything up to itself; ``[rows, Hq * D]`` in the query's dtype."""
        rows, num_heads, dim = query.shape
        out, lse = self._over_tails(layer, query, scale)
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
        return out.to(query.dtype).reshape(rows, num_heads * dim)

    def _over_tails(self, layer: int, query: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what is in the buffer, causally: ``[rows, Hq, D]`` and ``[rows, Hq]``, fp32."""
        num_requests = len(self._counts)
        if self._most == 1:
            padded = query.unsqueeze(2)
        else:
            padded = query.new_zeros((num_requests, self._most, *query.shape[1:]))
            padded[self._number, self._row] = query
            padded = padded.transpose(1, 2)
        keys, values = self._tails[layer].unbind(0)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            padded, keys, values, 0.0, False, attn_mask=self._mask, scale=scale
        )
        if self._most == 1:
            return out.squeeze(2).float(), lse.squeeze(2)
        return out.transpose(1, 2)[self._number, self._row].float(), lse.transpose(1, 2)[self._number, self._row]


def _over_extent(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``query [rows, Hq, D]`` over all of ``keys, values [1, H, T, D]``: ``[rows, Hq, D]`` and ``[rows, Hq]``, fp32."""
    rows, num_heads, dim = query.shape
    num_kv_heads = keys.shape[1]
    group = num_heads // num_kv_heads
    folded = query.view(rows, num_kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, num_kv_heads, group * rows, dim)
    out, lse = flash(folded, keys, values, scale, causal=False)
    out = out.view(num_kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, num_heads, dim).float()
    return out, lse.view(num_kv_heads, group, rows).permute(2, 0, 1).reshape(rows, num_heads)
