"""Dense: run every token behind the first segment in its place, as if nothing had been moved. Exact.

As a rung of its own it computes the first segment, too; ``suffix`` keeps the longest exact prefix, and ``prefix`` computes
nothing: it is there when all of the composite has been computed as one before.
"""

from __future__ import annotations

from aaflow_langgraph.compose.work import Work


def positions(work: Work) -> list[int]:
    """What is run: everything that is composed."""
    return list(range(work.start, len(work.token_ids)))
