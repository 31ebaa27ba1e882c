"""The ladder: which rung is taken, and what it leaves behind.

    prefix -> suffix -> legolink-k -> blend-r -> dense

Knows the rungs, their predicted costs and the caller's policy; knows no broker and no pool.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aaflow_langgraph.compose import blend, dense, legolink
from aaflow_langgraph.compose.cost import Costs
from aaflow_langgraph.compose.deviation import Deviations, measure, sample
from aaflow_langgraph.compose.work import Work
from aaflow_langgraph.composite import ComposePolicy

THRESHOLD = 0.5
"""Deviation above which a token counts in ``deviation_share`` where the caller named no threshold: half of its norm."""


@dataclass(slots=True)
class Climb:
    """What a rung did."""

    rung: str
    k: int
    r: float
    num_checked: int = 0
    deviation_max: float = 0.0
    deviation_mean: float = 0.0
    deviation_share: float = 0.0
    predicted_s: dict[str, float] = field(default_factory=dict)


def predict(work: Work, costs: Costs, k: int, r: float) -> dict[str, float]:
    """Predicted seconds of each rung that can be taken here."""
    moved, num_layers = work.moved, work.engine.layout.num_layers
    moving = costs.move(len(moved))
    chosen = sample(moved, blend.num_chosen(len(moved), r))
    return {
        "legolink": moving + costs.run(legolink.positions(work, k)),
        "blend": moving + costs.check(moved, num_layers) + costs.run(work.new + chosen),
        "suffix": costs.run(dense.positions(work)),
        "dense": costs.run(range(len(work.token_ids))),
    }


def climb(work: Work, policy: ComposePolicy, costs: Costs) -> Climb:
    """Take the rung that the policy names, or the cheapest that it allows, and leave the composite's KV in the rows."""
    found: Deviations | None = None
    k, r = policy.k, policy.r
    rung: str = policy.rung
    predicted = predict(work, costs, k, r)
    if rung == "auto":
        found = _measured(work) if policy.max_deviation is not None else None
        if found is not None:
            rung, k, r, predicted = _cheapest(work, policy, costs, found)
        else:
            rung = "legolink" if predicted["legolink"] < predicted["suffix"] else "suffix"
    made = Climb(rung, k, r, predicted_s=predicted)
    threshold = THRESHOLD if policy.max_deviation is None else policy.max_deviation
    if rung == "legolink":
        _note(made, work, legolink.positions(work, k), found, threshold)
    elif rung == "blend":
        found = found or _measured(work)
        _note(made, work, _blended(work, r, found), found, threshold)
    else:
        work.run(dense.positions(work))
    return made


def again(work: Work, rung: str, k: int, r: float) -> None:
    """The same once more, from a recipe."""
    if rung == "legolink":
        work.run(legolink.positions(work, k))
    elif rung == "blend":
        work.run(_blended(work, r, _measured(work)))
    else:
        work.run(dense.positions(work))


def _measured(work: Work) -> Deviations | None:
    """How far every moved token is off, new ones in their places; None where nothing was moved."""
    if not work.moved:
        return None
    work.run(work.new)
    return measure(work, work.moved)


def _blended(work: Work, r: float, found: Deviations | None) -> list[int]:
    """What blend runs, after it has kept what it measured."""
    if found is None:
        return work.new
    blend.keep_checked(work, r, found)
    return blend.positions(work, r, found)


def _cheapest(
    work: Work, policy: ComposePolicy, costs: Costs, found: Deviations
) -> tuple[str, int, float, dict[str, float]]:
    """The cheapest rung after which no moved token is left that deviates by more than the policy says."""
    limit = policy.max_deviation or 0.0
    over = {at for at, value in zip(found.positions, found.relative.tolist(), strict=True) if value > limit}
    # As many of the highest scores as it takes until none of those over the limit is left.
    order = found.score.argsort(descending=True, stable=True).tolist()
    needed = max((place + 1 for place, number in enumerate(order) if found.positions[number] in over), default=0)
    r = needed / max(1, len(order))
    k = 0 if not over else policy.k
    predicted = predict(work, costs, k, r)
    allowed = {"suffix": predicted["suffix"], "blend": predicted["blend"]}
    if over <= set(legolink.positions(work, k)):
        allowed["legolink"] = predicted["legolink"]
    rung = min(allowed, key=lambda name: allowed[name])
    return rung, k, r, predicted


def _note(made: Climb, work: Work, run: Sequence[int], found: Deviations | None, threshold: float) -> None:
    """Run tokens, and note how far those that are left deviate: all of them where that is known, else a sample."""
    work.run(run)
    done = set(run)
    if found is None:
        left = sample([at for at in work.moved if at not in done])
        if not left:
            return
        values = measure(work, left).relative
    else:
        values = found.relative[[at not in done for at in found.positions]]
    if len(values):
        made.num_checked = len(values)
        made.deviation_max, made.deviation_mean = float(values.max()), float(values.mean())
        made.deviation_share = float((values > threshold).float().mean())
