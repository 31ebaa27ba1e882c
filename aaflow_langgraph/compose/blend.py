"""CacheBlend (arXiv 2405.16444): recompute the share ``r`` of the moved tokens whose values deviate most.

Which ones is measured at layer 1, where every moved token's right keys and values are known after one layer of attention and
are kept (deviation.py). ``r = 0`` keeps all moved KV as it is; ``r = 1`` is the dense rung. Ties go to the earlier token.
"""

from __future__ import annotations

import torch

from aaflow_langgraph.compose.deviation import CHECK_LAYER, Deviations
from aaflow_langgraph.compose.work import Work


def num_chosen(num_moved: int, r: float) -> int:
    """How many moved tokens the share ``r`` is; any share above 0 is at least one."""
    return min(num_moved, -int(-(num_moved * r) // 1))


def positions(work: Work, r: float, found: Deviations) -> list[int]:
    """What is run: new tokens, and the share ``r`` of the moved ones with the highest scores."""
    count = num_chosen(len(found.positions), r)
    order = torch.sort(found.score, descending=True, stable=True).indices[:count].tolist()
    return work.new + [found.positions[number] for number in order]


def keep_checked(work: Work, r: float, found: Deviations) -> None:
    """Keep the right keys and values of the check layer for every moved token; with ``r = 0`` nothing is touched."""
    if num_chosen(len(found.positions), r) and work.mixed.rows.shape[0] > CHECK_LAYER:
        work.write(CHECK_LAYER, found.positions, found.keys, found.values)
