"""What the broker asks of an engine, in prose and types. Tensors yes, brokers no.

Axes are always ``[L, 2, H, T, D]``: layers, key/value, KV heads, tokens, head dim.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from aaflow_langgraph.model import BLOCK_TOKENS, KVLayout, Namespace

GRID_TOKENS = 2048
"""Canonical attention reads the past in pieces cut at absolute multiples of this, so its bits depend on token ids alone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """KV of the positions ``[start, stop)``, read-only by agreement: a view into an extent, never a copy.

    ``kv`` is ``[L, 2, H, stop - start, D]``; it stays valid as long as the lease on its extent.
    """

    kv: torch.Tensor
    start: int
    stop: int


class Tail(Protocol):
    """The private, growing end of one request. One run writes it; it is sealed or dropped by its owner.

    ``kv`` is ``[L, 2, H, capacity, D]`` and may be replaced by a larger tensor in ``ensure``; positions
    ``[start, start + length)`` hold KV.
    """

    kv: torch.Tensor
    start: int
    length: int

    def ensure(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` tokens in all; keeps what is written. Never raises for lack of pool space."""


class Run(Protocol):
    """One request in an engine: a fixed past, a growing tail. Not thread-safe; several runs may interleave.

    ``was_shared``: did its last forward compute for other requests as well?
    """

    position: int
    was_shared: bool

    def prefill(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Run ``token_ids`` (at least one) at ``position``, cut at absolute multiples of 256; advance.

        Returns the logits after the last of them, ``[vocab]``, fp32 or the model's dtype, on the model's device.
        """

    def decode(self, token_id: int) -> torch.Tensor:
        """Run one token; advance; logits as in ``prefill``."""


class Engine(Protocol):
    """Computes with KV in place. Safe to call from many threads: forwards of one engine are serialised.

    A run is deterministic when ``grid`` is given: its past is read in pieces cut at multiples of ``grid`` and nothing
    else influences the arithmetic, so equal token ids give equal bits (same thread count, library versions and
    instruction set; the namespace records them as facts).
    """

    namespace: Namespace
    layout: KVLayout
    window: int
    device: torch.device

    def start(self, past: Sequence[Piece], tail: Tail, *, grid: int | None, priority: int = 0) -> Run:
        """A run whose past is ``past`` (gap-free from 0 to ``tail.start``) followed by ``tail``. Where several runs want a
        forward, those of a smaller ``priority`` go first.
        """


def chunk_spans(start: int, stop: int) -> list[tuple[int, int]]:
    """``[start, stop)`` cut at absolute multiples of 256: ``(300, 600)`` gives ``(300, 512), (512, 600)``."""
    borders = range((start // BLOCK_TOKENS + 1) * BLOCK_TOKENS, stop, BLOCK_TOKENS)
    cuts = [start, *borders, stop]
    return list(itertools.pairwise(cuts)) if stop > start else []
