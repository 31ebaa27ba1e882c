"""One agent alone behind the warm context: how many tokens a second, side by side with handles; or why there is no rate."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from aaflow_langgraph.bench.lineup import HANDLES, Lineup
from aaflow_langgraph.bench.pairs import Ratio
from aaflow_langgraph.bench.sides import NotRun, Streaming


@dataclass(frozen=True, slots=True)
class Stream:
    """One agent alone behind the warm context, decode only. ``handles`` is how many times faster handles are, by round; None
    in the row of handles, which are compared with nothing else there.
    """

    side: str
    context: int
    tok_s: float
    rounds: int
    handles: Ratio | None


NO_RATE = "no rate of one stream: answers of one token (--output 1) have no step from a first to a last one"


def measure(lineup: Lineup, context: int, num_tokens: int, rounds: int) -> list[Stream]:
    """Single streams of at least two tokens in turns; a side that cannot is left out, its row says why."""
    rates: dict[str, list[float]] = {}
    able: list[Streaming] = list(lineup.streams)
    for number in range(rounds):
        for side in able[:: -1 if number % 2 else 1]:
            try:
                rates.setdefault(side.name, []).append(side.single_stream(num_tokens))
            except NotRun:
                able = [other for other in able if other is not side]
    return [
        Stream(
            side.name,
            context,
            round(statistics.median(rates[side.name]), 2),
            len(rates[side.name]),
            None
            if side.name == HANDLES
            else Ratio.of([mine / other for mine, other in zip(rates[HANDLES], rates[side.name], strict=True)]),
        )
        for side in able
    ]
