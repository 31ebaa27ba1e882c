"""One number of agents on one context, by every side of ``bench agents``: in which order they run, and what follows.

Knows pairs and rows; knows neither models nor how a side runs its agents.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from aaflow_langgraph.bench.lineup import HANDLES, NAMES, TRUTH, Lineup
from aaflow_langgraph.bench.pairs import Pairs, compare, extended
from aaflow_langgraph.bench.sides import NotRun, Outcome, Side

_PAIRED = (TRUTH, "deepcopy-batched", "vllm")
_KL_AGENTS = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A side with N agents: medians over ``rounds``. None where a side did not run or cannot say; ``note`` says why.

    ``spread`` is (max - min) / median of ``total_s``, ``agents_measured`` how many agents one round ran.
    """

    side: str
    agents: int
    context: int
    ttft_p50_s: float | None = None
    ttft_p95_s: float | None = None
    ttft_max_s: float | None = None
    total_s: float | None = None
    cpu_s: float | None = None
    out_tok_s: float | None = None
    kv_bytes: int | None = None
    agreement: float | None = None
    first_token_kl: float | None = None
    note: str = ""
    rounds: int = 0
    spread: float | None = None
    agents_measured: int = 0
    agent_s: float | None = None
    computed: tuple[str, ...] = ()


class Measured:
    """One number of agents on one context: runs of all sides, and what they say."""

    def __init__(self, lineup: Lineup, count: int, context: int, output: int) -> None:
        self._lineup = lineup
        self._count = count
        self._context = context
        self._output = output
        self._runs: dict[str, list[tuple[Outcome, Outcome]]] = {side.name: [] for side in lineup.others}
        self._mine: list[Outcome] = []
        self._notes: dict[str, str] = dict(lineup.missing)

    def run(self, rounds: int, slow_rounds: int, tell: Callable[[str], None]) -> None:
        """Every round runs each side once, with batched handles beside it."""
        for number in range(max(rounds, slow_rounds)):
            for side in self._lineup.others:
                if side.name in self._notes or number >= rounds_of(side, rounds, slow_rounds):
                    continue
                try:
                    self._pair(side, handles_first=number % 2 == 1, tell=tell)
                except NotRun as reason:
                    self._notes[side.name] = str(reason)
        while len(self._mine) < rounds:
            self._run_handles(tell)

    def rows(self) -> list[Row]:
        """In the order of ``NAMES``."""
        truth: dict[int, tuple[int, ...]] = {}
        for other, _ in self._runs.get(TRUTH, []):
            truth |= other.answers
        teller = next((side for side in self._lineup.others if side.name == TRUTH), None)
        expected = {} if teller is None else _distributions(teller, sorted(truth)[:_KL_AGENTS])
        rows = [Row(name, self._count, self._context, note=f"not run: {why}") for name, why in self._notes.items()]
        for side in (*self._lineup.others, self._lineup.batched):
            if side.name not in self._notes:
                outcomes = self._mine if side.name == HANDLES else [other for other, _ in self._runs[side.name]]
                rows.append(self._row(side, outcomes, truth, expected))
        return sorted(rows, key=lambda row: NAMES.index(row.side))

    def pairs(self) -> list[Pairs]:
        """Of every side that ran."""
        prefills = self._lineup.prefills
        return [
            compare(
                side.name,
                self._count,
                self._context,
                [(extended(other, self._count, is_serial=side.is_serial), mine) for other, mine in runs],
                (prefills.get(side.name), prefills[HANDLES]),
                is_computed=len(runs[0][0].ttft_s) < self._count,
            )
            for side in self._lineup.others
            if (runs := self._runs[side.name]) and side.name not in self._notes
        ]

    def _pair(self, side: Side, *, handles_first: bool, tell: Callable[[str], None]) -> None:
        mine = self._run_handles(tell) if handles_first else None
        other = side.run(self._count)
        tell(side.name)
        self._runs[side.name].append((other, mine or self._run_handles(tell)))

    def _run_handles(self, tell: Callable[[str], None]) -> Outcome:
        self._mine.append(self._lineup.batched.run(self._count))
        tell(HANDLES)
        return self._mine[-1]

    def _row(
        self,
        side: Side,
        outcomes: Sequence[Outcome],
        truth: dict[int, tuple[int, ...]],
        expected: dict[int, torch.Tensor],
    ) -> Row:
        count = self._count
        whole = [extended(outcome, count, is_serial=side.is_serial) for outcome in outcomes]
        num_measured = len(outcomes[0].token_ids)
        times = ("ttft_p50_s", "ttft_p95_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s")
        totals = [outcome.total_s for outcome in whole]
        total_s = statistics.median(totals)
        equal = [
            mine == right
            for outcome in outcomes
            for number, ids in outcome.answers.items()
            if number in truth
            for mine, right in zip(ids, truth[number], strict=True)
        ]
        return Row(
            side.name,
            count,
            self._context,
            ttft_p50_s=round(statistics.median(statistics.median(o.ttft_s) for o in whole), 4),
            ttft_p95_s=round(statistics.median(_p95(o.ttft_s) for o in whole), 4),
            ttft_max_s=round(statistics.median(max(o.ttft_s) for o in whole), 4),
            total_s=round(total_s, 4),
            cpu_s=round(statistics.median(o.cpu_s for o in whole), 4),
            out_tok_s=round(count * self._output / total_s, 2),
            kv_bytes=side.kv_bytes(count),
            agreement=round(sum(equal) / len(equal), 4) if equal else None,
            first_token_kl=_divergence(expected, _distributions(side, list(expected))),
            note=side.note,
            rounds=len(outcomes),
            spread=round((max(totals) - min(totals)) / total_s, 3),
            agents_measured=num_measured,
            agent_s=round(total_s / count, 4),
            computed=(*(times if num_measured < count else ()), *side.computed),
        )


def rounds_of(side: Side, rounds: int, slow_rounds: int) -> int:
    """How often a side runs: those that there are bars for ``rounds`` times."""
    return rounds if side.name in _PAIRED else slow_rounds


def _p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def _distributions(side: Side, numbers: Sequence[int]) -> dict[int, torch.Tensor]:
    known = {number: side.first_logprobs(number) for number in numbers}
    return {number: logprobs for number, logprobs in known.items() if logprobs is not None}


def _divergence(expected: dict[int, torch.Tensor], said: dict[int, torch.Tensor]) -> float | None:
    """Mean over agents of KL(expected || said), in nats; None where a side tells too little for a finite one."""
    each = []
    for number in expected.keys() & said.keys():
        right, mine = expected[number].double(), said[number].double()
        terms = right.exp() * (right - mine)
        each.append(float(terms[right.exp() > 0].sum().clamp(min=0.0)))
    mean = statistics.fmean(each) if each else math.inf
    return round(mean, 9) if math.isfinite(mean) else None
