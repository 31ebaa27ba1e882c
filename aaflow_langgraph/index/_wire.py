"""Extents and recipes as text in Redis, and back. What comes back is untrusted: every field is checked (S2, S3).

    record  "start stop canonical_stop checksum end_id hash hash ..."            never changes
            "... border border ... @position,position,..."                       follows where others were merged into it
    state   "start stop owner offset num_bytes generation parent on_disk"        "-" for no owner, no parent
    tokens  little-endian 32-bit integers, or nothing where the index keeps none

Extent ids are 16 hex digits there, because scripts compute in doubles and sets are sorted as text.
"""

from __future__ import annotations

import json
import re
from array import array
from dataclasses import replace
from typing import Any, NamedTuple, get_args

from aaflow_langgraph.composition import composition_fields, composition_from
from aaflow_langgraph.errors import ConfigError, IntegrityError
from aaflow_langgraph.hashing import token_bytes
from aaflow_langgraph.index.base import ExtentRecord, Place
from aaflow_langgraph.model import BLOCK_TOKENS, BlockHash, Operator, Recipe, Span, Turn
from aaflow_langgraph.pool.arena import Allocation

_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(rb"[0-9a-f]{16}")
_STATE = re.compile(
    rb"(\d{1,12}) (\d{1,12}) (-|[0-9A-Za-z][0-9A-Za-z_.-]{0,127}) (\d{1,18}) (\d{1,18}) (\d{1,19}) (-|[0-9a-f]{16}) ([01])"
)
_RECORD = re.compile(
    rb"(\d{1,12}) (\d{1,12}) (\d{1,12}) ([0-9a-f]{32}) ([0-9a-f]{64})((?: [0-9a-f]{64})*)(?: @(\d{1,12}(?:,\d{1,12})*))?"
)
NAMED_BLOCKS = 8
"""Of the blocks of an extent the first, the last and every eighth of the sequence lead to it (scripts/parts/names.lua)."""
_OPERATORS = frozenset(get_args(Operator))
_MAX_POSITION = 1 << 40


class State(NamedTuple):
    """What changes about an extent."""

    start: int
    stop: int
    place: Place | None
    parent: int | None
    on_disk: bool


def require_name(what: str, name: str) -> str:
    """An owner, holder or claim as it may stand in Redis (S2).

    Raises:
        ConfigError: It may not. Way out: fail.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{what} must be 1 to 128 letters, digits, '_', '.' or '-', not starting with one of those three"
        )
    return name


def require_digest(what: str, text: str) -> str:
    """A digest of 64 hex digits.

    Raises:
        ConfigError: It is none. Way out: fail.
    """
    if not _DIGEST.fullmatch(text):
        raise ConfigError(f"{what} must be 64 lower-case hex digits, got {len(text)} characters")
    return text


def to_id(extent_id: int) -> str:
    """An extent's id as text that sorts like the number."""
    return f"{extent_id:016x}"


def from_id(raw: object) -> int:
    """An extent's id from what the index says."""
    if not isinstance(raw, bytes) or not _ID.fullmatch(raw):
        raise IntegrityError("the index names an extent in a way that is not ours")
    return int(raw, 16)


def to_range(place: Place | None) -> str:
    """Offset, size and generation of a place."""
    if place is None:
        return "0 0 0"
    return f"{place.allocation.offset} {place.allocation.num_bytes} {place.allocation.generation}"


def to_place(place: Place | None) -> str:
    """A place with its owner."""
    return "- 0 0 0" if place is None else f"{place.owner} {to_range(place)}"


def to_record(record: ExtentRecord) -> str:
    """The part of an extent that never changes."""
    fields = [f"{record.start} {record.stop} {record.canonical_stop} {record.checksum} {record.end_id}", *record.hashes]
    if record.borders:
        fields += [name for _, name in record.borders]
        fields.append(f"@{_positions(record)}")
    return " ".join(fields)


def registered(record: ExtentRecord) -> tuple[str, ...]:
    """The names that the index leads to an extent by. Who shares any block with it shares its first one."""
    last = record.first_block + len(record.hashes)
    blocks = [
        name
        for block, name in enumerate(record.hashes, record.first_block + 1)
        if block in (record.first_block + 1, last) or block % NAMED_BLOCKS == 0
    ]
    return (*blocks, *(name for _, name in record.borders), record.end_id)


def to_key(record: ExtentRecord) -> str:
    """What two extents of equal KV have in common (I8)."""
    key = f"{record.end_id}:{record.start}:{record.canonical_stop}"
    return f"{key}:{_positions(record)}" if record.borders else key


def to_tokens(token_ids: tuple[int, ...]) -> bytes:
    """Token ids, packed.

    Raises:
        ConfigError: One is negative or does not fit 32 bits. Way out: fail.
    """
    try:
        return token_bytes(token_ids)
    except (OverflowError, TypeError) as error:
        raise ConfigError("a token id is no number from 0 to 2**32 - 1") from error


def from_state(raw: object) -> State:
    """What changes about an extent.

    Raises:
        IntegrityError: It is malformed or out of bounds (S3).
    """
    match = _STATE.fullmatch(raw) if isinstance(raw, bytes) else None
    if match is None:
        raise IntegrityError("the state of an extent in the index is malformed")
    start, stop, owner, offset, num_bytes, generation, parent, on_disk = match.groups()
    place = None
    if owner != b"-":
        place = Place(owner.decode(), Allocation(int(offset), int(num_bytes), int(generation)))
    first, last = int(start), int(stop)
    if not first < last <= _MAX_POSITION or (place is not None and place.allocation.num_bytes < 1):
        raise IntegrityError(f"an extent in the index says tokens [{first}, {last}) in {int(num_bytes)} bytes")
    return State(first, last, place, None if parent == b"-" else int(parent, 16), on_disk == b"1")


def from_record(extent_id: int, raw: object, packed: object) -> ExtentRecord:
    """An extent at no place yet, from the part that never changes.

    Raises:
        IntegrityError: It is malformed, or its parts contradict each other (S3).
    """
    match = _RECORD.fullmatch(raw) if isinstance(raw, bytes) else None
    if match is None:
        raise IntegrityError(f"the record of extent {extent_id:016x} in the index is malformed")
    start, stop, canonical = int(match[1]), int(match[2]), int(match[3])
    names = match[6].decode().split()
    positions = [int(position) for position in match[7].split(b",")] if match[7] else []
    if (positions and not start < positions[0] <= positions[-1] < stop) or positions != sorted(set(positions)):
        raise IntegrityError(f"extent {extent_id:016x} in the index has borders that do not lie inside it, in order")
    num_hashes = max(0, len(names) - len(positions))
    hashes = tuple(BlockHash(name) for name in names[:num_hashes])
    token_ids: tuple[int, ...] = ()
    if packed is not None:
        if not isinstance(packed, bytes) or len(packed) != 4 * (stop - start):
            raise IntegrityError(f"extent {extent_id:016x} in the index has not the tokens it says")
        token_ids = tuple(array("I", packed))
    if (
        not start < stop <= _MAX_POSITION
        or canonical > stop
        or len(names) - len(positions) != stop // BLOCK_TOKENS - start // BLOCK_TOKENS
    ):
        raise IntegrityError(
            f"extent {extent_id:016x} in the index says tokens [{start}, {stop}), canonical to {canonical}, and has "
            f"{len(hashes)} block hashes"
        )
    return ExtentRecord(
        extent_id=extent_id,
        start=start,
        stop=stop,
        token_ids=token_ids,
        end_id=match[5].decode(),
        hashes=hashes,
        canonical_stop=canonical,
        parent=None,
        place=None,
        checksum=match[4].decode(),
        borders=tuple(zip(positions, names[num_hashes:], strict=False)),
    )


def placed(record: ExtentRecord, state: State) -> ExtentRecord:
    """The record where the state says it is.

    Raises:
        IntegrityError: They disagree about its span.
    """
    if (state.start, state.stop) != (record.start, record.stop):
        raise IntegrityError(f"extent {record.extent_id:016x} in the index contradicts itself about its span")
    if (state.place, state.parent, state.on_disk) == (record.place, record.parent, record.on_disk):
        return record
    return replace(record, place=state.place, parent=state.parent, on_disk=state.on_disk)


def to_recipe(recipe: Recipe) -> str:
    """A recipe as JSON. It holds token ids and positions, no text (S14)."""
    turns = [[turn.role, turn.content.start, turn.content.stop, turn.open] for turn in recipe.turns]
    made = () if recipe.composition is None else (composition_fields(recipe.composition),)
    return json.dumps(
        [
            *(recipe.namespace, recipe.parent, recipe.start, recipe.token_ids, recipe.num_pending, turns),
            *(recipe.operator, *made),
        ],
        separators=(",", ":"),
    )


def from_recipe(kv_id: str, raw: object) -> Recipe:
    """A recipe from what the index says.

    Raises:
        IntegrityError: It is malformed or its numbers contradict each other (S3).
    """
    try:
        namespace, parent, start, token_ids, num_pending, turns, operator, *composed = json.loads(bytes(raw))  # type: ignore[call-overload]
        stop = _count(start) + len(token_ids)
        whole = (
            _DIGEST.fullmatch(namespace)
            and (parent is None or _DIGEST.fullmatch(parent))
            and (parent is not None or start == 0)
            and all(0 <= _count(token) < 1 << 32 for token in token_ids)
            and _count(num_pending) <= len(token_ids)
            and operator in _OPERATORS
            and len(composed) == (operator == "compose")
        )
        made = tuple(Turn(_short(role), Span(_count(a), _count(b)), _flag(open_)) for role, a, b, open_ in turns)
        if whole and stop <= _MAX_POSITION and all(turn.content.stop <= stop for turn in made):
            composition = composition_from(composed[0], start, stop) if composed else None
            return Recipe(kv_id, namespace, parent, start, tuple(token_ids), num_pending, made, operator, composition)
    except (ValueError, TypeError, RecursionError, IntegrityError) as error:
        raise IntegrityError(f"the recipe of {kv_id[:12]} in the index is malformed") from error
    raise IntegrityError(f"the recipe of {kv_id[:12]} in the index contradicts itself")


def _positions(record: ExtentRecord) -> str:
    return ",".join(str(position) for position, _ in record.borders)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a count")
    return value


def _short(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 64:
        raise ValueError("not a role")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a flag")
    return value
