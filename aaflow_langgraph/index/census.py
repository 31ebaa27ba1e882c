"""Everything that a server knows of one namespace, at one moment, as values. Knows the index; decides nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from aaflow_langgraph.errors import ConfigError, IntegrityError
from aaflow_langgraph.index import _replies as replies
from aaflow_langgraph.index import _wire as wire
from aaflow_langgraph.index._server import explained, key_names
from aaflow_langgraph.index._snapshot import findings
from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.model import Recipe


@dataclass(frozen=True, slots=True)
class CountedExtent:
    """An extent without its token ids, and how often it was leased since it was published (once by its writer)."""

    record: ExtentRecord
    num_uses: int


@dataclass(frozen=True, slots=True)
class Census:
    """What is there. Seconds left are negative when a time is over and nobody swept.

    Attributes:
        owners: Seconds left by owner.
        extents: Every extent whose entry can be read; the others are among the findings.
        leases: Seconds left of each.
        claims: Seconds left by name.
        num_recipes: Shared recipes, the old ones included.
        num_old_recipes: Those past their time.
        findings: What contradicts itself, as ``Index.check`` has it.
    """

    owners: dict[str, float]
    extents: tuple[CountedExtent, ...] = field(repr=False)
    leases: tuple[float, ...]
    claims: dict[str, float]
    num_recipes: int
    num_old_recipes: int
    findings: tuple[tuple[str, str], ...]


def take_census(index: RedisIndex, namespace: str) -> Census:
    """Read it all. What cannot be read is a finding.

    Args:
        index: The index of the namespace.
        namespace: Its digest, or at least the first 32 digits.

    Raises:
        IndexUnavailable: Way out: retry.
        IntegrityError: The server answered with something else. Way out: fail.
    """
    now = replies.seconds(replies.items(index.server.run("owners"))[0])
    owners = index.owners()
    snapshot = replies.items(index.server.run("snapshot"), 13)
    records, states, held, claims = (_table(snapshot[number]) for number in (0, 1, 4, 6))
    extents = []
    for raw_id, raw_state in states.items():
        try:
            line, _, _, uses = raw_state.rsplit(b" ", 3)
            record = wire.from_record(wire.from_id(raw_id), records.get(raw_id), None)
            extents.append(CountedExtent(wire.placed(record, wire.from_state(line)), replies.count(uses)))
        except (IntegrityError, ValueError):
            continue  # among the findings
    key = key_names(namespace.ljust(64, "0"), ("recipe_deadlines",))[0]
    try:
        num_old_recipes = replies.count(index.server.client.zcount(key, "-inf", now))
    except RedisError as error:
        raise explained(error) from error
    return Census(
        owners=owners,
        extents=tuple(sorted(extents, key=lambda extent: extent.record.extent_id)),
        leases=tuple(_left(line, now) for line in held.values()),
        claims={name.decode("ascii", "replace"): _left(line, now) for name, line in claims.items()},
        num_recipes=len(replies.items(snapshot[12])),
        num_old_recipes=num_old_recipes,
        findings=tuple(findings(snapshot)),
    )


def shared_recipes(index: RedisIndex, namespace: str) -> list[Recipe]:
    """Recipes that the server has. Looking does not make them live longer.

    Raises:
        IndexUnavailable: Way out: retry.
        IntegrityError: The server answered with something else. Way out: fail.
    """
    key = key_names(namespace.ljust(64, "0"), ("recipes",))[0]
    try:
        lines = index.server.client.hgetall(key)
    except RedisError as error:
        raise explained(error) from error
    found = []
    for raw_id, line in lines.items():
        kv_id = replies.text(raw_id).decode("ascii", "replace")
        # Names and forms that are not ours are the sweep's and the readers' matter.
        with suppress(IntegrityError, ConfigError):
            wire.require_digest("a kv_id", kv_id)
            found.append(wire.from_recipe(kv_id, replies.text(line).split(b" ", 2)[-1]))
    return found


def _table(part: object) -> dict[bytes, bytes]:
    flat = replies.items(part)
    return {replies.text(field): replies.text(value) for field, value in zip(flat[::2], flat[1::2], strict=True)}


def _left(line: bytes, now: float) -> float:
    """Seconds until the deadline that a line begins with; one that is no number is long over, as for the sweep."""
    try:
        return replies.seconds(line.split(b" ", 1)[0]) - now
    except IntegrityError:
        return -now
