"""What is there now, over index, pools and files, put together from outside: no model, no broker, no torch.

Knows where to ask and what belongs together; knows no invariants (check.py) and no output (table.py, metrics.py).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from aaflow_langgraph.errors import ConfigError, IntegrityError
from aaflow_langgraph.hashing import extent_name
from aaflow_langgraph.index.base import ExtentRecord
from aaflow_langgraph.index.census import Census, take_census
from aaflow_langgraph.index.namespaces import look_into, namespaces
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.pool.inventory import Inventory, Stock
from aaflow_langgraph.pool.onlooking import SeenPool, look

MEMORY = "memory://"
SILENT_S = 7.5
"""An owner renews its lease of 15 s five times in that time. One without a socket here that has less than this left does not
live on another host either."""

Tier = Literal["host", "disk", "both"]
TIERS: tuple[Tier, ...] = ("host", "disk", "both")


@dataclass(frozen=True, slots=True)
class Seen:
    """One namespace.

    Attributes:
        namespace: Its digest; the first 32 digits where only a server knows it.
        index: To ask more of; None where no server has keys of it.
        census: What the index knows; None likewise.
        pools: What was seen of the owners that the index or an extent names.
        stock: Its files; None where no directory was given or none is there.
        problem: Why there is no census although there are keys; else empty.
    """

    namespace: str
    index: RedisIndex | None
    census: Census | None
    pools: dict[str, SeenPool]
    stock: Stock | None
    problem: str = ""

    def records(self) -> list[ExtentRecord]:
        """Every extent that the index knows."""
        return [extent.record for extent in self.census.extents] if self.census else []

    def is_gone(self, owner: str) -> bool:
        """Is this owner certainly no more? Not said of one that is absent here and may live elsewhere."""
        condition = self.pools[owner].condition
        left_s = self.census.owners.get(owner, 0.0) if self.census else 0.0
        return condition == "dead" or (condition == "absent" and left_s < SILENT_S)


class Outside:
    """A place to look from: an index' URL, a disk pool's directory, or both. A context manager; look as often as you like.

    Raises:
        ConfigError: Nothing to look at, a wrong URL or credentials, a directory that is no disk pool. Way out: fail.
        IndexUnavailable: The server cannot be reached. Way out: retry.
    """

    def __init__(self, index: str, disk: str | None, *, run_dir: Path | None = None) -> None:
        if index == MEMORY and disk is None:
            raise ConfigError(
                "nothing to look at: give --index URL (an index in memory is seen by its own process only), --disk DIR, or both"
            )
        self.disk = disk
        self.run_dir = run_dir
        self._url = index
        self._indexes: dict[str, RedisIndex] = {}
        self._closing = contextlib.ExitStack()
        self.inventory = None if disk is None else self._closing.enter_context(Inventory(disk))

    @property
    def has_index(self) -> bool:
        """Is there a server to look at?"""
        return self._url != MEMORY

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing.close()

    def look(self) -> list[Seen]:
        """Every namespace that the index or the directory knows, as it is now.

        Raises:
            ConfigError, IndexUnavailable: As above.
        """
        on_server = set(namespaces(self._url)) if self.has_index else set()
        on_disk = {name[:32]: name for name in self.inventory.namespaces()} if self.inventory else {}
        return [self._seen(half, half in on_server, on_disk.get(half)) for half in sorted(on_server | on_disk.keys())]

    def _seen(self, half: str, is_on_server: bool, on_disk: str | None) -> Seen:
        # In this order: a file is there before the index says so, a range is published before.
        index = self._index(half) if is_on_server else None
        census, problem = None, ""
        try:
            census = take_census(index, half) if index else None
        except IntegrityError as error:
            problem = str(error)
        stock = self.inventory.stock(on_disk) if self.inventory and on_disk else None
        owners = set(census.owners) if census else set()
        owners |= {extent.record.place.owner for extent in census.extents if extent.record.place} if census else set()
        return Seen(on_disk or half, index, census, look(sorted(owners), self.run_dir), stock, problem)

    def _index(self, half: str) -> RedisIndex:
        if half not in self._indexes:
            self._indexes[half] = look_into(self._url, half)
            self._closing.callback(self._indexes[half].close)
        return self._indexes[half]


def file_of(record: ExtentRecord) -> str:
    """The name, without suffix, of an extent's file."""
    return extent_name(record.end_id, record.start, record.canonical_stop)


def tier_of(record: ExtentRecord) -> Tier:
    """Where an extent is."""
    if record.place is None:
        return "disk"
    return "both" if record.on_disk else "host"


def document(seen: Sequence[Seen]) -> dict[str, Any]:
    """The same as a JSON document: numbers and names, no token ids."""
    return {"schema": 1, "name": "inspect", "namespaces": [_described(one) for one in seen]}


def _described(seen: Seen) -> dict[str, Any]:
    census, stock = seen.census, seen.stock
    placed = Counter(record.place.owner for record in seen.records() if record.place)
    return {
        "namespace": seen.namespace,
        "owners": [
            {
                "owner": owner,
                "condition": pool.condition,
                "lease_left_s": round(census.owners[owner], 3) if census and owner in census.owners else None,
                "pid": pool.pid,
                "process": pool.process,
                "capacity_bytes": pool.capacity_bytes,
                "used_bytes": pool.used_bytes,
                "num_extents": placed[owner],
            }
            for owner, pool in seen.pools.items()
        ],
        "extents": {tier: _summed(seen, tier) for tier in TIERS},
        "num_uses": sum(extent.num_uses for extent in census.extents) if census else 0,
        "num_leases": len(census.leases) if census else 0,
        "num_leases_over": sum(left_s <= 0 for left_s in census.leases) if census else 0,
        "num_claims": len(census.claims) if census else 0,
        "num_recipes": census.num_recipes if census else 0,
        "files": None
        if stock is None
        else {
            "num_extents": len(stock.extents),
            "num_tokens": stock.num_tokens,
            "num_recipes": stock.num_recipes,
            "num_bytes": stock.num_bytes,
        },
    }


def _summed(seen: Seen, tier: Tier) -> dict[str, int]:
    """Extents, tokens and bytes of a tier. Bytes are those in memory, of what is on disk only its file's."""
    files = seen.stock.extents if seen.stock else {}
    records = [record for record in seen.records() if tier_of(record) == tier]
    return {
        "num_extents": len(records),
        "num_tokens": sum(record.num_tokens for record in records),
        "num_bytes": sum(
            record.place.allocation.num_bytes if record.place else files.get(file_of(record), 0) for record in records
        ),
    }
