"""How far moved KV is from what it would be in its new place, measured where it is cheap: at layer 1.

Layer 0 needs no context, so its keys and values are right as soon as they are moved; one layer of attention over them gives
the right hidden states behind it, and with them the right values of layer 1. The score of a token is the squared distance of
its values there (CacheBlend, arXiv 2405.16444, section 4.3); its deviation is the root of that over the norm of the right
ones. A proxy: that layer 1 is close says that much of layer 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aaflow_langgraph.compose.work import Work

CHECK_LAYER = 1
SAMPLE_TOKENS = 64
"""So many tokens are checked for a report where no rung needs all of them."""


@dataclass(frozen=True, slots=True)
class Deviations:
    """Of the tokens at ``positions``: the right keys and values ``[H, T, D]`` of the check layer, and the relative
    deviation ``[T]`` and the squared distance ``[T]`` of the values that are there, fp32.
    """

    positions: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    relative: torch.Tensor
    score: torch.Tensor


def measure(work: Work, positions: Sequence[int]) -> Deviations:
    """Deviations of moved tokens, at least one."""
    keys, values = work.check(positions)
    layer = min(CHECK_LAYER, work.mixed.rows.shape[0] - 1)
    right = values.float()
    score = (work.rows_of(layer, positions)[1].float() - right).square().sum((0, 2))
    norm = right.square().sum((0, 2)).clamp_min(1e-12)
    return Deviations(list(positions), keys, values, (score / norm).sqrt(), score)


def sample(positions: Sequence[int], count: int = SAMPLE_TOKENS) -> list[int]:
    """At most ``count`` of the positions, evenly spread, the same ones every time."""
    if len(positions) <= count:
        return list(positions)
    return [positions[number * len(positions) // count] for number in range(count)]
