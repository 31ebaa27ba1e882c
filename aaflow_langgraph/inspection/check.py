"""Every invariant that can be checked from outside, over index, pools and files. Changes nothing.

A system at work is never all in one state, and there is no moment at which index, memory and files can be read together. So
what is found is looked at once more, a moment later: what is the same both times is a finding, the rest is in transition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from aaflow_langgraph.checkpoint.beside import Beside
from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.inspection import checkpoints
from aaflow_langgraph.inspection.view import Outside, Seen, file_of
from aaflow_langgraph.model import KVLayout
from aaflow_langgraph.pool.sweep import leftovers

PAUSE_S = 1.0
"""Between the two looks: longer than the half second in which a keeper notices a death and takes over."""

OVER_S = 15.0
"""What is past its time for longer than this was not swept, though living owners sweep every three seconds."""

_ANY_LAYOUT = KVLayout(1, 1, 1, "float32", 4)


@dataclass(frozen=True, slots=True, order=True)
class Found:
    """One thing that was found. ``where``: the first digits of its namespace, ``"disk"``, ``"checkpoints"`` or ``"run dir"``."""

    where: str
    invariant: str
    what: str


@dataclass(frozen=True, slots=True)
class Checked:
    """The outcome.

    Attributes:
        findings: Violated invariants and what was left behind.
        in_transition: What was so only at one of the two looks.
        notes: What could not be looked at, and what is no fault.
        num_extents: Extents that were looked at.
        num_files: Files of extents that were.
    """

    findings: tuple[Found, ...]
    in_transition: tuple[Found, ...]
    notes: tuple[str, ...]
    num_extents: int
    num_files: int

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return {"schema": 1, "name": "check", **asdict(self)}


def check(
    outsides: Sequence[Outside],
    *,
    beside: Beside | None = None,
    payloads: bool = False,
    pause: Callable[[float], object] = time.sleep,
) -> Checked:
    """Look, and look again if anything was found.

    Args:
        outsides: What to look at.
        beside: What lies beside a checkpoint saver, to look at as well; its files of tensors are one of ``outsides``.
        payloads: Read all KV and compare it with its checksum, too: files, and memory whose shape the files tell.
        pause: Waits between the looks.

    Raises:
        ConfigError, IndexUnavailable: As ``Outside.look`` and ``Beside``.
    """
    found, notes, seen = _look_at_all(outsides, beside, payloads)
    again = found
    if found:
        pause(PAUSE_S)
        again, notes, seen = _look_at_all(outsides, beside, payloads)
    return Checked(
        tuple(sorted(found & again)),
        tuple(sorted(found ^ again)),
        tuple(notes),
        sum(len(one.records()) for one in seen),
        sum(len(one.stock.extents) for one in seen if one.stock),
    )


def lost_places(seen: Seen) -> list[ExtentRecord]:
    """Extents that are said to be in the pool of a living owner, at a range that is not theirs (any more)."""
    return [
        record
        for record in seen.records()
        if record.place
        and seen.pools[record.place.owner].condition == "alive"
        and not seen.pools[record.place.owner].holds(record.place.allocation)
    ]


def lost_files(seen: Seen) -> list[ExtentRecord]:
    """Extents that are said to be on disk, where the directory that was looked at has files of their namespace but theirs."""
    files = seen.stock.extents if seen.stock else None
    return [
        record for record in seen.records() if files is not None and record.on_disk and file_of(record) not in files
    ]


def _look_at_all(
    outsides: Sequence[Outside], beside: Beside | None, payloads: bool
) -> tuple[set[Found], list[str], list[Seen]]:
    found: set[Found] = set()
    notes: list[str] = []
    seen: list[Seen] = []
    for outside in outsides:
        its_found, its_notes, its_seen = _look(outside, payloads)
        found |= its_found
        notes += its_notes
        seen += its_seen
    if beside is not None:
        found |= {Found(checkpoints.WHERE, invariant, what) for invariant, what in checkpoints.findings(beside)}
        notes += [f"{checkpoints.WHERE}: {note}" for note in checkpoints.notes(beside)]
    return found, notes, seen


def _look(outside: Outside, payloads: bool) -> tuple[set[Found], list[str], list[Seen]]:
    seen = outside.look()
    found: set[Found] = set()
    notes: list[str] = []
    for one in seen:
        where = one.namespace[:12]
        found |= {Found(where, invariant, what) for invariant, what in _of_index(one)}
        found |= {Found(where, invariant, what) for invariant, what in _of_places(one)}
        found |= {Found(where, invariant, what) for invariant, what in _of_files(one)}
        if payloads:
            found |= {Found(where, "I5", what) for what in _changed_bytes(one)}
        notes += [f"{where}: {note}" for note in _notes(one, outside.disk)]
        if one.stock is not None and outside.disk is not None:
            found |= _of_contents(outside.disk, one, payloads)
    if outside.inventory is not None:
        found |= {Found("disk", "I11", f"{name} is none of ours") for name in outside.inventory.foreign()}
    if outside.has_index:
        found |= {
            Found("run dir", "I11", f"{path} was left by a process that is gone") for path in leftovers(outside.run_dir)
        }
    return found, notes, seen


def _of_index(seen: Seen) -> Iterator[tuple[str, str]]:
    """What contradicts itself, owners that are gone, and what is past its time."""
    if seen.problem:
        yield "I4", seen.problem
    if seen.census is None:
        return
    yield from seen.census.findings
    for owner in seen.census.owners:
        if seen.is_gone(owner):
            pid = seen.pools[owner].pid
            yield "I7", f"owner {owner} ({f'process {pid}' if pid else 'no socket'}) is gone and still registered"
    over = {"leases": seen.census.leases, "claims": tuple(seen.census.claims.values())}
    for name, left in over.items():
        if number := sum(left_s < -OVER_S for left_s in left):
            yield "I9", f"{number} {name} are past their time and nobody sweeps"
    if seen.census.num_old_recipes and not any(pool.condition == "alive" for pool in seen.pools.values()):
        yield "I9", f"{seen.census.num_old_recipes} recipes are past their time and nobody sweeps"


def _of_places(seen: Seen) -> Iterator[tuple[str, str]]:
    taken: dict[tuple[str, int], int] = {}
    for record in lost_places(seen):
        place = record.place
        if place is not None:
            yield "I4", f"extent {record.extent_id:016x} is at {place.allocation.offset} of {place.owner} no more"
    for record in seen.records():
        if record.place is not None:
            at = (record.place.owner, record.place.allocation.offset)
            if at in taken:
                yield "I8", f"extents {taken[at]:016x} and {record.extent_id:016x} are at {at[1]} of {at[0]} both"
            taken[at] = record.extent_id


def _of_files(seen: Seen) -> Iterator[tuple[str, str]]:
    if seen.stock is None or seen.census is None:
        return
    for record in lost_files(seen):
        yield "I4", f"extent {record.extent_id:016x} is said to be on disk, file {file_of(record)} is not there"
    if any(record.on_disk for record in seen.records()):
        for name in seen.stock.extents.keys() - {file_of(record) for record in seen.records()}:
            yield "I11", f"file {name} is named by no extent of the index"


def _of_contents(disk: str, seen: Seen, payloads: bool) -> set[Found]:
    """What ``DiskPool`` finds; what lies beside the namespaces' folders is everybody's."""
    from aaflow_langgraph.pool.disk import DiskPool  # torch

    assert seen.stock is not None
    pool = DiskPool(disk, seen.namespace, seen.stock.layout or _ANY_LAYOUT, 1 << 62)
    try:
        findings = pool.check(payloads=payloads)
    finally:
        pool.close()
    everybodys = ("tmp/", "quarantine/")
    return {
        Found("disk" if one.what.startswith(everybodys) else seen.namespace[:12], one.invariant, one.what)
        for one in findings
    }


def _changed_bytes(seen: Seen) -> Iterator[str]:
    """KV in memory that does not have its checksum. The shape of a token comes from the files."""
    if seen.stock is None or seen.stock.layout is None:
        return
    for record in seen.records():
        if record.place is not None:
            pool, allocation = seen.pools[record.place.owner], record.place.allocation
            view = pool.read(allocation, seen.stock.layout.num_bytes(record.num_tokens + record.num_tokens % 2))
            if view is not None and xxhash.xxh3_128_hexdigest(view) != record.checksum and pool.holds(allocation):
                yield f"the bytes of extent {record.extent_id:016x} changed since they were published"


def _notes(seen: Seen, disk: str | None) -> Iterator[str]:
    for owner, pool in seen.pools.items():
        if pool.condition == "absent" and not seen.is_gone(owner):
            yield f"owner {owner} has no socket here (it is closing, or lives elsewhere); its extents were not looked at"
        if pool.condition == "silent":
            yield f"owner {owner} (process {pool.pid}) does not answer (stopped or busy); its extents were not looked at"
    on_disk = [record for record in seen.records() if record.on_disk]
    if disk is not None and seen.stock is None and on_disk:
        yield f"{len(on_disk)} extents are said to be on disk, and {disk} has no files of this namespace: another directory?"
    if seen.stock is not None and not on_disk and seen.stock.extents:
        yield f"{len(seen.stock.extents)} files of extents are named by no index; the next broker announces them"
