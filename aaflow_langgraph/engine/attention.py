"""Attention over a past that lies in pieces: the fast read path.

    out = merge over pieces of flash(q, K_piece, V_piece), weighted by softmax of their log-sum-exps

(the split-softmax identity used by FlashAttention, arXiv 2205.14135, and Hydragen, arXiv 2402.05099). KV heads are never
repeated: the query heads that share one are folded into the query axis. Registered under unmodified transformers models
as the attention ``"aaflow"``; outside of a run of ours it behaves exactly as ``"sdpa"``.

Knows tensors and the current thread's run; knows no broker, no pool, no transformers cache class.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from aaflow_langgraph.engine.base import Piece, Tail

NAME = "aaflow"
_LOG2E = math.log2(math.e)

# Anything here changes what attention means; a model that passes one is read through its own cache classes instead.
_UNSUPPORTED = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")

_current = threading.local()


class FastPathRefused(Exception):
    """A model asked this attention for something it does not do. Internal: the probe turns it into the universal path."""


class Reader(Protocol):
    """What attention asks while a forward runs."""

    layer: int

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """See ``Past.attend``."""


class Past:
    """What the layers of one forward attend to, and where they write. Lives for one run, used by one thread at a time."""

    __slots__ = ("_pieces", "_reads", "extents", "grid", "layer", "num_new", "tail")

    def __init__(self, pieces: Sequence[Piece], tail: Tail, grid: int | None) -> None:
        self.tail = tail
        self.grid = grid
        self.layer = -1
        self.num_new = 0
        self.extents = [piece.kv for piece in pieces]
        self._pieces = [per_layer(kv) for kv in self.extents]
        self._reads = self._pieces

    def begin(self, num_new: int) -> None:
        """Fix what this forward reads: every piece, then the written part of the tail, cut at the grid."""
        self.make_room(num_new)
        tail = self.tail
        # A single query is causal by itself, so its own key joins the tail's piece and saves one call.
        num_read = tail.length + (1 if num_new == 1 else 0)
        self._reads = self._pieces + [per_layer(tail.kv[..., a:b, :]) for a, b in self.cuts(num_read)]

    def make_room(self, num_new: int) -> None:
        """Let ``slots`` be the room of this many new tokens."""
        self.tail.ensure(self.tail.length + num_new)
        self.num_new = num_new

    def places(self, num_new: int) -> Sequence[int]:
        """Where in the tail the new tokens go; each attends to everything up to its own place."""
        return range(self.tail.length, self.tail.length + num_new)

    def pieces(self, num_tail: int) -> list[list[tuple[torch.Tensor, ...]]]:
        """Keys and values of everything in front of position ``tail.start + num_tail``, by layer."""
        return self._pieces + ([per_layer(self.tail.kv[..., :num_tail, :])] if num_tail else [])

    def slots(self) -> tuple[torch.Tensor, ...]:
        """For every layer the room of its new keys and values, ``[2, H, T, D]``."""
        at = self.tail.length
        return self.tail.kv[..., at : at + self.num_new, :].unbind(0)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the new keys and values (``[1, H, T, D]``) of ``layer`` behind the tail."""
        if keys.shape[0] != 1:
            raise FastPathRefused(f"batch of {keys.shape[0]}; runs are one sequence each")
        at = self.tail.length
        slot = self.tail.kv[layer]
        slot[0, :, at : at + self.num_new] = keys[0]
        slot[1, :, at : at + self.num_new] = values[0]
        self.layer = layer

    def attend(self, layer: int, query: torch.Tensor, scale: float | None) -> torch.Tensor:
        """``query [T, Hq, D]`` of the new tokens, or ``[1, Hq, D]`` of the last, over everything up to itself.

        The layer's new keys and values lie in the tail already. Returns ``[T, Hq * D]``, contiguous, in the query's dtype.
        """
        rows, num_heads, dim = query.shape
        tail = self.tail
        num_kv_heads = tail.kv.shape[2]
        group = num_heads // num_kv_heads
        # [T, Hq, D] -> [1, H, group * T, D]: the heads that share a KV head become more queries over it.
        folded = query.view(rows, num_kv_heads, group, dim).permute(1, 2, 0, 3).reshape(1, -1, group * rows, dim)
        reads = [kv[layer] for kv in self._reads]
        if rows == 1 < self.num_new:
            whole = [tail.kv[layer, :, None, :, a:b] for a, b in self.cuts(tail.length + self.num_new)]
            reads = [kv[layer] for kv in self._pieces] + [kv.unbind(0) for kv in whole]
        parts = [flash(folded, keys, values, scale, causal=False) for keys, values in reads]
        if rows > 1:
            # Folding would break the diagonal.
            keys, values = tail.kv[layer, :, None, :, tail.length : tail.length + rows].unbind(0)
            out, lse = flash(query.transpose(0, 1)[None], keys, values, scale, causal=True)
            parts.append((out.reshape(folded.shape), lse.reshape(folded.shape[:-1])))
        joined = merge(*zip(*parts, strict=True))
        if rows == 1:
            return joined.to(query.dtype).view(1, num_heads * dim)
        result = query.new_empty(rows, num_heads * dim)
        result.view(rows, num_kv_heads, group, dim).copy_(
            joined.view(num_kv_heads, group, rows, dim).permute(2, 0, 1, 3)
        )
        return result

    def cuts(self, num_read: int) -> list[tuple[int, int]]:
        """The first ``num_read`` tokens of the tail, cut at the grid."""
        return _cut(self.tail.start, num_read, self.grid) if num_read else []


def per_layer(kv: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """``[L, 2, H, T, D]`` as keys and values ``[1, H, T, D]`` of every layer, made once instead of in every forward."""
    return [layer.unbind(0) for layer in kv.unsqueeze(2).unbind(0)]


def merge(outs: Sequence[torch.Tensor], lses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join softmax-normalised partial results ``[..., T, D]`` by their log-sum-exps ``[..., T]``, in fp32, in order."""
    if len(outs) == 1:
        return outs[0]
    if len(outs) == 2:  # the common case, in half of the operations
        return outs[1].float().lerp(outs[0].float(), (lses[0] - lses[1]).sigmoid_().unsqueeze(-1))
    weights = torch.stack(tuple(lses)).float().softmax(0)
    joined = outs[0].float() * weights[0].unsqueeze(-1)
    for out, weight in zip(outs[1:], weights[1:], strict=True):
        joined.addcmul_(out.float(), weight.unsqueeze(-1))
    return joined


def flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention ``[1, Hq, Tq, D]`` over ``[1, H, Tk, D]`` with its log-sum-exp ``[1, Hq, Tq]`` (natural log, fp32).

    ``Hq`` is a multiple of ``H``: neighbouring query heads share a KV head.
    """
    if query.device.type == "cpu":
        if not causal and prefers_products(query, keys.shape[2]):
            joined = products(query[0], keys[0], values[0], scale or query.shape[-1] ** -0.5)
            if joined is not None:
                return joined[0][None], joined[1][None]
        if not causal and _leaves_a_thread_idle(query, keys):
            return _flash_of_halves(query, keys, values, scale)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, attn_mask=None, scale=scale
        )
        return out, lse
    group = query.shape[1] // keys.shape[1]
    if group > 1:  # these kernels want one KV head per query head
        keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        result = torch.ops.aten._scaled_dot_product_flash_attention(
            query, keys, values, 0.0, causal, False, scale=scale
        )
        return result[0], result[1][..., : query.shape[2]]
    return _reference(query, keys, values, scale, causal)


def _leaves_a_thread_idle(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """The kernel deals out (head, 32 queries): few of them and an odd number leave one of two threads waiting."""
    units = query.shape[1] * -(-query.shape[2] // 32)
    return units % 2 == 1 and units < 8 and keys.shape[2] >= 1024 and torch.get_num_threads() > 1


def _flash_of_halves(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash`` over both halves of the keys at once, ``[1, H, T, D]`` read as ``[H, 2, T / 2, D]``."""
    length = keys.shape[2]
    share = -(-length // 2)
    queries = query[0].unsqueeze(1).expand(-1, 2, -1, -1)
    halves = [
        x[0].as_strided(
            (x.shape[1], 2, share, x.shape[3]), (x.stride(1), (length - share) * x.stride(2), *x.stride()[2:])
        )
        for x in (keys, values)
    ]
    mask = _overlap(share, query.dtype) if length % 2 else None
    outs, lses = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, *halves, 0.0, False, attn_mask=mask, scale=scale
    )
    first, second = lses.unbind(1)
    return merge(outs.unbind(1), (first, second))[None], torch.logaddexp(first, second)[None]


@lru_cache(maxsize=8)
def _overlap(share: int, dtype: torch.dtype) -> torch.Tensor:
    """Halves of an odd length share the middle key: hide it from the second."""
    mask = torch.zeros(1, 2, 1, share, dtype=dtype, device="cpu")
    mask[:, 1, :, 0] = float("-inf")
    return mask


def products(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, seen: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attention ``[H, R, D]`` over ``[H, T, D]`` by two large matrix products; None when exponentials overflow.

    ``seen [q, S]`` of ones and zeros in the query's dtype says which of the last ``S`` keys the last axis of ``R = (group, q)``
    attends to (more than 64 rows only); the keys before them are everybody's.

    bf16 products round the scores. They are taken relative to a reference ``c`` close to each row's maximum (the largest
    score over 32 sampled keys, the sink at position 0 among them), subtracted in fp32 before the rounding, so that the
    scores that matter are small and lose as little as the probabilities do in any bf16 kernel.
    """
    heads, rows, dim = query.shape
    length = keys.shape[1]
    scale *= _LOG2E  # powers of two take two thirds of the time of powers of e
    step = max(1, length // 32)
    sample = torch.bmm(keys[:, ::step].float(), query.float().transpose(-1, -2))
    if seen is not None:  # what is hidden must not raise the reference; key 0 is everybody's
        start = length - seen.shape[1]
        hidden = seen[:, -start % step :: step].t() == 0
        rest = sample[:, sample.shape[1] - hidden.shape[0] :]
        by_group = rest.view(heads, len(hidden), rows // len(seen), len(seen))
        by_group.masked_fill_(hidden[None, :, None], float("-inf"))
    shifts = reference = sample.amax(1, keepdim=True).mul_(scale).to(query.dtype)
    # An odd number of heads leaves one of two threads idle for a third of the time: halve the keys as well.
    parts = 2 if heads % 2 and torch.get_num_threads() > 1 else 1
    share = -(-length // parts)
    if parts > 1:
        query, shifts = query.repeat_interleave(parts, 0), shifts.repeat_interleave(parts, 0)
        keys, values = _halved(keys, share), _halved(values, share)
    # Keys times queries packs the smaller side; with more rows the second product loses more than that.
    upright = rows <= 64
    if upright:
        weights = torch.baddbmm(shifts, keys, query.transpose(-1, -2), beta=-1, alpha=scale).exp2_()
    else:
        weights = torch.baddbmm(shifts.transpose(-1, -2), query, keys.transpose(-1, -2), beta=-1, alpha=scale).exp2_()
    if parts * share > length:
        weights[parts - 1 :: parts].select(1 if upright else 2, -1).zero_()  # the row that rounds an odd extent up
    if seen is not None:
        by_part = weights.view(heads, parts, rows // len(seen), len(seen), share)
        for part in range(parts):
            a, b = max(start, part * share), min(length, (part + 1) * share)
            if a < b:
                by_part[:, part, ..., a - part * share : b - part * share].mul_(seen[:, a - start : b - start])
    total = _sums(weights, 1 if upright else 2).view(heads, parts, rows).sum(1)
    out = torch.bmm(weights.transpose(-1, -2) if upright else weights, values)
    out = out.view(heads, parts, rows, dim).sum(1, dtype=torch.float32).div_(total.unsqueeze(-1))
    lse = total.log_().add_(reference.squeeze(1), alpha=1 / _LOG2E)
    if not math.isfinite(lse.sum().item()):
        return None
    return out, lse  # fp32: rounding waits until the pieces are merged


def _halved(tensor: torch.Tensor, share: int) -> torch.Tensor:
    """``[H, T, D]`` as ``[2 H, share, D]``: a view when a head's stride is exactly two shares, as whole extents have it.

    Of an odd length the view takes in one row more per head: the zeroed row that rounds an extent or a tail up, or for a
    part of an extent a neighbouring row. The caller gives it no weight.
    """
    heads, length, dim = tensor.shape
    stop = tensor.storage_offset() + 2 * heads * share * dim
    if tensor.stride() == (2 * share * dim, dim, 1) and stop * tensor.itemsize <= tensor.untyped_storage().nbytes():
        return tensor.as_strided((2 * heads, share, dim), (share * dim, dim, 1))
    padded = tensor.new_zeros(heads, 2 * share, dim)
    padded[:, :length] = tensor
    return padded.view(2 * heads, share, dim)


def _sums(weights: torch.Tensor, axis: int) -> torch.Tensor:
    """fp32 sums over ``axis``. bf16 sums are twice as fast and accumulate in fp32; eight of them per row, added in fp32,
    leave a rounding error well below that of the weights themselves.
    """
    length = weights.shape[axis] // 8 * 8
    parts = weights.narrow(axis, 0, length).view(*weights.shape[:axis], 8, length // 8, *weights.shape[axis + 1 :])
    total = torch.sum(parts.sum(axis + 1), axis, dtype=torch.float32)
    if length == weights.shape[axis]:
        return total
    rest = weights.narrow(axis, length, weights.shape[axis] - length)
    return total + torch.sum(rest, axis, dtype=torch.float32)


@lru_cache(maxsize=1)
def has_tiles() -> bool:
    """Has the CPU matrix tiles (AMX)? They run the flash kernel's own bf16 products at full speed; others lose half of it."""
    return bool(torch.cpu._is_amx_tile_supported())


def prefers_products(query: torch.Tensor, length: int) -> bool:
    """Measured on 2 cores with AVX512-BF16: flash against products, by rows and length. Depends on shapes and the
    instruction set only, so that equal requests take equal paths.
    """
    rows = query.shape[2]
    if query.dtype != torch.bfloat16 or length < 1024 or has_tiles():
        return False
    return rows * length >= 190_000 or (length >= 4096 and rows >= 12)


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
def reading(past: Reader) -> Iterator[None]:
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
    past: Reader | None = getattr(_current, "past", None)
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
    # The cache layer has written this layer's new keys and values into the tail.
    return past.attend(past.layer, query[0].transpose(0, 1), scaling).view(1, query.shape[2], query.shape[1], -1), None


def _mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """No mask inside a run of ours (causality is in the kernel call); the stock mask otherwise."""
    if getattr(_current, "past", None) is None:
        return sdpa_mask(*args, **kwargs)
    if kwargs.get("local_size") is not None or kwargs.get("use_vmap"):
        raise FastPathRefused("a layer asks for a windowed or customised mask")
    return None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
