"""Is everything that the index keeps on the server consistent? Reads one snapshot; knows the invariants, no server."""

from __future__ import annotations

from typing import Any

from aaflow_langgraph.errors import IntegrityError
from aaflow_langgraph.index import _wire as wire
from aaflow_langgraph.index.base import ExtentRecord

Findings = list[tuple[str, str]]


def findings(snapshot: list[Any]) -> Findings:
    """Violated invariants as (number, words), from the reply of ``snapshot.lua``."""
    try:
        records, states, names, keys, held, owners, _ = (_table(part) for part in snapshot[:7])
        children, readers, owned = (_pairs(part) for part in snapshot[7:10])
        deadlines, tokens, recipes = ({bytes(member) for member in part} for part in snapshot[10:13])
    except (TypeError, ValueError, IndexError) as error:
        raise IntegrityError("the index's snapshot is malformed") from error
    found: Findings = []
    extents: dict[bytes, ExtentRecord] = {}
    for raw_id in {*records, *states, *tokens}:
        try:
            extents[raw_id] = _extent(raw_id, records.get(raw_id), states.get(raw_id))
        except IntegrityError as error:
            found.append(("I4", str(error)))
    for raw_id, record in extents.items():
        found += _of_extent(raw_id, record, extents, names, keys, children, owned, owners)
    found += [
        ("I4", f"a name leads to extent {_shown(raw_id)}, which is unknown")
        for value in names.values()
        for raw_id in (entry.split(b":")[0] for entry in value.split(b" "))
        if raw_id not in extents
    ]
    found += [
        ("I3", f"extent {_shown(above)} was removed under a child") for above, _ in children if above not in extents
    ]
    found += [
        ("I3", f"extent {_shown(raw_id)} was removed under a lease") for raw_id, _ in readers if raw_id not in extents
    ]
    found += [
        ("I2", f"extent {_shown(raw_id)} is held by a lease that does not exist")
        for raw_id, lease in readers
        if raw_id not in held.get(lease, b"").split()[1:]
    ]
    found += [
        ("I2", "a lease is missing from an extent it pins")
        for lease, ids in held.items()
        for raw_id in ids.split()[1:]
        if (raw_id, lease) not in readers
    ]
    if deadlines != recipes:
        found.append(("I9", f"{len(deadlines ^ recipes)} recipes have no deadline or no content"))
    return found


def _of_extent(
    raw_id: bytes,
    record: ExtentRecord,
    extents: dict[bytes, ExtentRecord],
    names: dict[bytes, bytes],
    keys: dict[bytes, bytes],
    children: set[tuple[bytes, bytes]],
    owned: set[tuple[bytes, bytes]],
    owners: dict[bytes, bytes],
) -> Findings:
    number = _shown(raw_id)
    found: Findings = []
    if keys.get(wire.to_key(record).encode()) != raw_id:
        found.append(("I8", f"extent {number} shares its key with another"))
    if record.parent is not None and (wire.to_id(record.parent).encode(), raw_id) not in children:
        found.append(("I2", f"extent {number} is missing among the children of extent {record.parent:016x}"))
    if record.place is None and not record.on_disk:
        found.append(("I4", f"extent {number} is neither in memory nor on disk"))
    if record.place is not None:
        owner = record.place.owner.encode()
        if owner not in owners:
            found.append(("I7", f"extent {number} is at a place of an owner that is gone"))
        if (owner, raw_id) not in owned:
            found.append(("I4", f"extent {number} is missing among what its owner holds"))
    for name in wire.registered(record):
        if raw_id not in (entry.split(b":")[0] for entry in names.get(name.encode(), b"").split(b" ")):
            found.append(("I4", f"extent {number} cannot be found by one of its hashes"))
    return found


def _extent(raw_id: bytes, raw: bytes | None, raw_state: bytes | None) -> ExtentRecord:
    return wire.placed(
        wire.from_record(wire.from_id(raw_id), raw, None), wire.from_state((raw_state or b"").rsplit(b" ", 3)[0])
    )


def _table(part: Any) -> dict[bytes, bytes]:
    return {bytes(field): bytes(value) for field, value in zip(part[::2], part[1::2], strict=True)}


def _pairs(part: Any) -> set[tuple[bytes, bytes]]:
    pairs = (bytes(member).split(b" ") for member in part)
    return {(first, second) for first, second in pairs}


def _shown(raw_id: bytes) -> str:
    return raw_id[:16].decode("ascii", "replace")
