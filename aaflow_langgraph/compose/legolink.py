"""LegoLink (EPIC, arXiv 2410.15332): recompute the first ``k`` tokens of every moved segment, in all layers.

A segment that was encoded apart has a false attention sink at its first tokens; the few tokens that are recomputed in their
new context repair it. ``k = 0`` is plain reuse; ``k`` as long as every segment is the dense rung.
"""

from __future__ import annotations

from aaflow_langgraph.compose.work import Work


def positions(work: Work, k: int) -> list[int]:
    """What is run: new tokens, and the first ``k`` of every moved segment."""
    return work.new + [at for span in work.segments for at in range(span.start, min(span.start + k, span.stop))]
