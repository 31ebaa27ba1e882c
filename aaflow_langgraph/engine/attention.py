"""Attention over a past that lies in pieces: the fast read path.

    out = merge over pieces of flash(q, K_piece, V_piece), weighted by softmax of their log-sum-exps

(the split-softmax identity used by FlashAttention, arXiv 2205.14135, and Hydragen, arXiv 2402.05099). KV heads are never
repeated: the query heads that share one are folded into the query axis. Registered under unmodified transformers models
as the attention ``"aaflow"``; outside of a run of ours it behaves exactly as ``"sdpa"``.

Knows tensors and the current thread's run; knows no broker, no pool, no transformers cache class.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from aaflow_langgraph.engine.base import Piece, Tail

NAME = "aaflow"

# Anything here changes what attention means; a model that passes one is read through its own cache classes instead.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")

_current = threading.local()


class FastPathRefused(Exception):
    """A model asked this attention for something it does not do. Internal: the probe turns it into the universal path."""


class Past:
    """What the layers of one forward attend to, and where they write. Lives for one run, used by one thread at a time."""

    __slots__ = ("_reads", "grid", "layer", "num_new", "pieces", "tail")

    def __init__(self, pieces: Sequence[Piece], tail: Tail, grid: int | None) -> None:
        self.pieces = tuple(pieces)
        self.tail = tail
        self.grid = grid
        self.layer = -1
        self.num_new = 0
        self._reads: list[torch.Tensor] = []

    def begin(self, num_new: int) -> None:
        """Fix what this forward reads: every piece, then the written part of the tail, cut at the grid."""
        tail = self.tail
        tail.ensure(tail.length + num_new)
        self.num_new = num_new
        # A single query is causal by itself, so its own key joins the tail's piece and saves one call.
        num_read = tail.length + (1 if num_new == 1 else 0)
        reads = [piece.kv for piece in self.pieces]
        if num_read:
            reads += [tail.kv[..., a:b, :] for a, b in _cut(tail.start, num_read, self.grid)]
        self._reads = reads

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new keys and values (``[1, H, T, D]``) of ``layer`` behind the tail."""
        if keys.shape[0] != 1:
            raise FastPathRefused(f"batch of {keys.shape[0]}; runs are one sequence each")
        at = self.tail.length
        slot = self.tail.kv[layer]
        slot[0, :, at : at + self.num_new] = keys[0]
        slot[1, :, at : at + self.num_new] = values[0]
        self.layer = layer

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """``query [1, Hq, T, D]`` over the past and over its own ``keys, values [1, H, T, D]``; ``[1, Hq, T, D]``."""
        num_heads, num_kv_heads = query.shape[1], keys.shape[1]
        group = num_heads // num_kv_heads
        layer, num_new = self.layer, query.shape[2]
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        # [1, Hq, T, D] -> [1, H, group * T, D]: the heads that share a KV head become more queries over it.
        folded = query.reshape(1, num_kv_heads, group * num_new, query.shape[3])
        for kv in self._reads:
            out, lse = flash(folded, kv[layer, 0][None], kv[layer, 1][None], scale, causal=False)
            outs.append(out)
            lses.append(lse)
        if num_new > 1:
            # Folding would break the diagonal, and repeating at most one chunk of KV is cheap.
            own_keys = keys.repeat_interleave(group, dim=1) if group > 1 else keys
            own_values = values.repeat_interleave(group, dim=1) if group > 1 else values
            out, lse = flash(query, own_keys, own_values, scale, causal=True)
            outs.append(out.reshape(folded.shape))
            lses.append(lse.reshape(folded.shape[:-1]))
        return merge(outs, lses).reshape(query.shape)


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join softmax-normalised partial results ``[..., T, D]`` by their log-sum-exps ``[..., T]``, in fp32, in order."""
    if len(outs) == 1:
        return outs[0]
    weights = torch.stack(tuple(lses)).float().softmax(0)
    joined = outs[0].float() * weights[0].unsqueeze(-1)
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        joined.addcmul_(out.float(), weight.unsqueeze(-1))
    return joined.to(outs[0].dtype)


def flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[1, H, Tq, D]`` over ``[1, H, Tk, D]`` with its log-sum-exp ``[1, H, Tq]`` (natural log, fp32)."""
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=None, scale=scale
        )
        return out, lse
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
        return result[0], result[1][..., : query.shape[2]]
    return _reference(query, keys, values, scale, causal)


def _reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by plain matrix products in fp32, for devices and dtypes without a flash kernel that returns the lse."""
    scores = torch.matmul(query.float(), keys.float().transpose(-1, -2)) * (scale or query.shape[-1] ** -0.5)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.matmul((scores - lse.unsqueeze(-1)).exp(), values.float())
    return out.to(query.dtype), lse


@contextmanager
def reading(past: Past) -> Iterator[None]:
    """Let the forwards of this thread read ``past``. Not reentrant: a run is one forward at a time."""
    _current.past = past
    try:
        yield
    finally:
        _current.past = None


def _cut(origin: int, length: int, grid: int | None) -> list[tuple[int, int]]:
    """Local spans of ``[0, length)`` cut where ``origin + x`` is a multiple of ``grid``; one span without a grid."""
    if grid is None:
        return [(0, length)]
    cuts = [0, *range(grid - origin % grid, length, grid), length]
    return list(itertools.pairwise(cuts))


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The function that transformers models call."""
    past: Past | None = getattr(_current, "past", None)
    if past is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
        return result
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise FastPathRefused(f"{type(module).__name__} passes {name}={kwargs[name]!r} to its attention")
    if attention_mask is not None:
        raise FastPathRefused(f"{type(module).__name__} builds its own attention mask")
    return past.attend(query, key, value, scaling).transpose(1, 2).contiguous(), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask inside a run of ours (causality is in the kernel call); the stock mask otherwise."""
    if getattr(_current, "past", None) is None:
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("local_size") is not None or kwargs.get("use_vmap"):
        raise FastPathRefused("a layer asks for a windowed or customised mask")
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
