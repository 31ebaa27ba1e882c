"""How many times better batched handles are than what ran beside them: ratios of pairs, not of medians.

On a machine with other work the same run takes 1.5 times as long a minute later. Two runs side by side meet the same
machine, so the ratio of each pair is taken first, then the median and the spread of the ratios.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aaflow_langgraph.bench.sides import Outcome


@dataclass(frozen=True, slots=True)
class Prefill:
    """What the first prefill of the shared context takes a side: seconds of CPU and of the clock."""

    cpu_s: float
    wall_s: float


NO_PREFILL = Prefill(0.0, 0.0)
"""Of a side that keeps nothing: it prefills the context within every run."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Of each pair, in the order they ran; above 1 handles are better."""

    median: float
    min: float
    max: float
    each: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        """Median and spread of at least one value."""
        each = tuple(round(value, 3) for value in values)
        return cls(round(statistics.median(values), 3), min(each), max(each), each)


@dataclass(frozen=True, slots=True)
class Pairs:
    """A side against ``handles-batched`` run right beside it, in alternating order. Total time's ratio is ``out_tok_s``.

    ``*_with_prefill``: with one first prefill of the context on either side, as each of them does it; a side that keeps
    nothing has it in its runs. None where the side does not say what its prefill takes. ``is_computed``: the side ran some
    of the agents, and what all take follows from that.
    """

    side: str
    agents: int
    context: int
    num_pairs: int
    is_computed: bool
    cpu: Ratio
    out_tok_s: Ratio
    ttft_p50: Ratio
    ttft_max: Ratio
    cpu_with_prefill: Ratio | None
    total_with_prefill: Ratio | None


def compare(
    side: str,
    agents: int,
    context: int,
    runs: Sequence[tuple[Outcome, Outcome]],
    prefills: tuple[Prefill | None, Prefill],
    *,
    is_computed: bool,
) -> Pairs:
    """The ratios of ``runs``, pairs of (the side's, handles'), of all ``agents`` each; ``prefills`` in the same order."""

    def ratio(value: Callable[[Outcome], float], theirs: float = 0.0, ours: float = 0.0) -> Ratio:
        return Ratio.of([(value(other) + theirs) / (value(mine) + ours) for other, mine in runs])

    prefill, own = prefills
    return Pairs(
        side,
        agents,
        context,
        len(runs),
        is_computed,
        cpu=ratio(lambda run: run.cpu_s),
        out_tok_s=ratio(lambda run: run.total_s),
        ttft_p50=ratio(lambda run: statistics.median(run.ttft_s)),
        ttft_max=ratio(lambda run: max(run.ttft_s)),
        cpu_with_prefill=None if prefill is None else ratio(lambda run: run.cpu_s, prefill.cpu_s, own.cpu_s),
        total_with_prefill=None if prefill is None else ratio(lambda run: run.total_s, prefill.wall_s, own.wall_s),
    )


def extended(outcome: Outcome, count: int, *, is_serial: bool) -> Outcome:
    """What a run of some agents says about ``count``: agents, or batches as large as the one that ran, wait in line."""
    num_run = len(outcome.ttft_s)
    if num_run == count:
        return outcome
    size = 1 if is_serial else num_run
    each_s = outcome.total_s * size / num_run
    times = tuple(number // size * each_s + outcome.own_ttft_s for number in range(count))
    share = count / num_run
    return Outcome(
        outcome.token_ids, times, outcome.total_s * share, outcome.cpu_s * share, outcome.own_ttft_s, outcome.numbers
    )
