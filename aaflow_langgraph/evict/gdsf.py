"""Greedy-Dual-Size-Frequency: keep what was used often and is dear to compute for its bytes. A pure function.

An extent is worth ``num_uses * recompute_cost / num_bytes``, less what it has lost since its last use.

Source: L. Cherkasova, "Improving WWW Proxies Performance with Greedy-Dual-Size-Frequency Caching Policy", HP Labs
HPL-98-69R1, 1998. There a clock, raised to the worth of every victim, is added to an extent's worth at its last use. Only
differences of clock readings matter, and between two uses the clock moves by about one extent's worth while one extent
lives. Here those differences are estimated from the candidates themselves: *an extent unused for their mean age has lost
their mean worth*. The clock would have to be kept somewhere, and be the same in every process that evicts from one index
and after each restart; the estimate is nobody's. Replayed on two public trace sets it hit more than the clock in pools of
5,000 blocks and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum

from aaflow_langgraph.evict.base import Candidate, Order, SortKey, oldest, take
from aaflow_langgraph.evict.cost import recompute_cost


def greedy_dual_size_frequency(
    candidates: Sequence[Candidate], need_bytes: int, ties: Order = oldest
) -> list[Candidate]:
    """The least worthy candidates whose bytes add up to ``need_bytes``; all of them if they do not."""
    newest = max((c.last_used for c in candidates), default=0)
    total_age = sum(newest - c.last_used for c in candidates)
    # fsum is exact, so that the order of the candidates plays no part; both means have the same divisor.
    loss = fsum(map(_worth, candidates)) / total_age if total_age else 0.0

    def rank(candidate: Candidate) -> SortKey:
        return (_worth(candidate) - loss * (newest - candidate.last_used),)

    return take(candidates, need_bytes, rank, ties)


def _worth(candidate: Candidate) -> float:
    return candidate.num_uses * recompute_cost(candidate.start, candidate.num_tokens) / candidate.num_bytes
