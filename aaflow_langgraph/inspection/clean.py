"""What can be cleaned up: each thing with its size and the one call that removes it. A plan changes nothing until it is applied.

Only what nobody uses: owners that are gone, what is past its time, files and sockets of processes that do not run. Every
removal is conditional where it matters, so that what came to life since the plan was made stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.inspection.check import PAUSE_S, lost_files, lost_places
from aaflow_langgraph.inspection.checkpoints import Removal
from aaflow_langgraph.inspection.view import Outside, Seen
from aaflow_langgraph.pool.inventory import Inventory
from aaflow_langgraph.pool.sweep import leftovers, sweep


@dataclass(frozen=True, slots=True)
class Step:
    """One removal. Equal when it removes the same thing.

    Attributes:
        what: In words; without what may change between two looks.
        num_bytes: What it gives back.
        remove: Does it; False when there was nothing (any more).
    """

    what: str
    num_bytes: int = field(compare=False)
    remove: Callable[[], bool] = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What was removed or, in a dry run, would be."""

    applied: bool
    removed: tuple[Step, ...]

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "schema": 1,
            "name": "gc",
            "applied": self.applied,
            "removed": [{"what": step.what, "num_bytes": step.num_bytes} for step in self.removed],
            "num_bytes": sum(step.num_bytes for step in self.removed),
        }


def clean(
    outsides: Sequence[Outside],
    *,
    apply: bool,
    beside: Beside | None = None,
    quarantine: bool = False,
    run_dir: bool = False,
    pause: Callable[[float], object] = time.sleep,
) -> Cleaned:
    """Plan, and do what was planned if ``apply``.

    The plan is made twice, a moment apart: what heirs or a sweep take care of by themselves is left to them.

    Args:
        outsides: Indexes and files to clean up; none for the run directory alone.
        apply: Do it.
        beside: What lies beside a checkpoint saver, to clean up as well; its files of tensors are one of ``outsides``.
        quarantine: Damaged files that were kept for a look, too.
        run_dir: Sockets and fallback memory of dead owners, too, whatever index they used.
        pause: Waits between the two looks.

    Raises:
        ConfigError, IndexUnavailable: As ``Outside.look`` and ``Beside``. What was removed until then stays removed.
    """
    if not outsides and beside is None and not run_dir:
        raise ConfigError(
            "nothing to clean up: give --index URL, --disk DIR, --checkpoints PATH, --run-dir or several of them"
        )
    with ExitStack() as stack:
        removal = None if beside is None else stack.enter_context(Removal(beside))
        steps = _plan(outsides, removal, quarantine, run_dir)
        if steps:
            pause(PAUSE_S)
            before = set(steps)
            steps = [step for step in _plan(outsides, removal, quarantine, run_dir) if step in before]
        return Cleaned(apply, tuple(step for step in steps if not apply or step.remove()))


def _plan(outsides: Sequence[Outside], removal: Removal | None, quarantine: bool, run_dir: bool) -> list[Step]:
    steps: list[Step] = []
    for outside in outsides:
        for seen in outside.look():
            if seen.index is not None:
                steps += _of_index(seen, seen.index)
        if outside.inventory is not None:
            steps += _of_files(outside.inventory, quarantine)
    if removal is not None:
        steps += [Step(what, num_bytes, remove) for what, num_bytes, remove in removal.steps()]
    if run_dir:
        place = outsides[0].run_dir if outsides else None
        steps += [
            Step(f"{path}, left by a process that is gone", num_bytes, partial(_swept, path, place))
            for path, num_bytes in leftovers(place).items()
        ]
    return steps


def _of_index(seen: Seen, index: RedisIndex) -> Iterator[Step]:
    census, where = seen.census, seen.namespace[:12]
    if census is None:
        return
    for owner in census.owners:
        if seen.is_gone(owner) and f"adopt.{owner}" not in census.claims:
            placed = [record.place for record in seen.records() if record.place and record.place.owner == owner]
            num_bytes = sum(place.allocation.num_bytes for place in placed)
            yield Step(f"{where}: owner {owner}, which is gone", num_bytes, partial(_left, index, owner))
    for record in lost_places(seen):
        if record.place is not None:
            yield Step(
                f"{where}: the place of extent {record.extent_id:016x}, where other bytes are by now",
                0,
                partial(index.lose, record.extent_id, record.place),
            )
    for record in lost_files(seen):
        yield Step(
            f"{where}: the word that extent {record.extent_id:016x} is on disk, where its file is missing",
            0,
            partial(index.set_on_disk, record.extent_id, False),
        )
    over = (
        sum(left_s <= 0 for left_s in census.leases)
        + sum(left_s <= 0 for left_s in census.owners.values())
        + sum(left_s <= 0 for left_s in census.claims.values())
        + census.num_old_recipes
    )
    if over:
        yield Step(f"{where}: leases, owners, claims and recipes past their time", 0, partial(_swept_index, index))


def _of_files(inventory: Inventory, quarantine: bool) -> Iterator[Step]:
    for name, num_bytes in inventory.leftovers().items():
        yield Step(f"tmp/{name}, never finished", num_bytes, partial(inventory.remove_leftover, name))
    for name, num_bytes in inventory.quarantined().items() if quarantine else ():
        yield Step(f"quarantine/{name}, damaged", num_bytes, partial(inventory.remove_quarantined, name))


def _left(index: RedisIndex, owner: str) -> bool:
    index.leave(owner)
    return True


def _swept_index(index: RedisIndex) -> bool:
    index.sweep()
    return True


def _swept(path: Path, run_dir: Path | None) -> bool:
    sweep(run_dir)  # takes all of them at the first step
    return not path.exists()
