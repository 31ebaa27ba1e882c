"""What an operation of the index costs, against a bare round trip to the same server.

Question. Every request asks the index a few times. How far is that from what asking the server anything costs?

Legs, interleaved call by call in one process on one connection:

* ``bare``        ``return 1`` by EVALSHA through the same client, with no keys and no arguments: what no script can beat;
* every operation of the index, on extents of a 4,096-token context (16 blocks). Lookups are warm: the extent has been read
  before. ``match new`` is what a request asks first: the reply is proved, 4,096 token ids compared. ``match`` is what it asks
  then, about the same ids: an equal reply is proved already. ``lookup`` is the same on an index that keeps no token ids.

Physics. A round trip is two system calls on each side, two wake-ups, and the client's own Python. An operation adds what it
sends (16 names of 64 characters are 1 kB, token ids 16 kB), its calls inside the server, and the reading of the reply. ``ratio``
= its p50 over the p50 of the bare round trips right before and after it, so both find the caches that their neighbours leave.
One that writes a few fields stays below ``bar``; ``put``, ``match`` and ``remove`` take 13, 6 and 12 commands and cannot
(docs/explanation/many-processes.md says what each part of them costs).
"""

from __future__ import annotations

import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.hashing import block_hashes, prefix_id
from aaflow_langgraph.index.base import ExtentRecord, Place, Query
from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.index.redis import RedisIndex
from aaflow_langgraph.model import BLOCK_TOKENS
from aaflow_langgraph.pool.arena import Allocation

CONTEXT = 4096
BAR = 1.3
_WARM_UP = 50
_OWNER = "0" * 32
_LEASE_S = 60.0


def run(url: str | None, rounds: int, seed: int = 0) -> dict[str, Any]:
    """Measure; the result is a JSON-ready document. Leaves no keys behind.

    Raises:
        ConfigError: The URL names no server. Way out: fail.
    """
    times: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        url = url or f"embedded://{stack.enter_context(tempfile.TemporaryDirectory(prefix='aaf-'))}/server"
        index = stack.enter_context(_opened(url, share_recipes=True))
        silent = stack.enter_context(_opened(url, share_recipes=False))
        bare = index.server.client.register_script("return 1")
        told = index.server.client.info("server")
        epoch, silent_epoch = index.join(_OWNER, 1e6), silent.join(_OWNER, 1e6)
        context = tuple(range(seed, seed + CONTEXT))
        made, query = _extent(index, context, secrets.token_hex(32))
        quiet, quiet_query = _extent(silent, context, secrets.token_hex(32))
        for one, record, number in ((index, made, epoch), (silent, quiet, silent_epoch)):
            one.release(one.put(record, number, _LEASE_S)[1])
        for number in range(_WARM_UP + rounds):
            taken: list[tuple[str, float]] = []
            fresh, _ = _extent(index, context, secrets.token_hex(32))

            def timed(
                name: str, call: Callable[[], Any], taken: list[tuple[str, float]] = taken, at: int = number
            ) -> Any:
                legs = (("bare", bare), (name, call))
                answers = {}
                for leg, body in legs if at % 2 else reversed(legs):  # whoever is second finds warmer caches
                    started = time.perf_counter()
                    answers[leg] = body()
                    taken.append((leg if leg == name else f"bare {name}", time.perf_counter() - started))
                return answers[name]

            _, writers = timed("put", partial(index.put, fresh, epoch, _LEASE_S))
            timed("release", partial(index.release, writers))
            timed("remove", partial(index.remove, fresh.extent_id, _OWNER))
            match = timed("match", partial(index.match, query, CONTEXT, _LEASE_S))
            new = replace(query, token_ids=(*context,))
            first = timed("match new", partial(index.match, new, CONTEXT, _LEASE_S))
            receipt = timed("renew", partial(index.renew, match.receipt, _LEASE_S))
            lookup = timed("lookup", partial(silent.match, quiet_query, CONTEXT, _LEASE_S))
            timed("heartbeat", partial(index.heartbeat, _OWNER, epoch, _LEASE_S))
            timed("claim", partial(index.claim, fresh.end_id, _OWNER, _LEASE_S))
            timed("unclaim", partial(index.unclaim, fresh.end_id, _OWNER))
            index.release(receipt)
            index.release(first.receipt)
            silent.release(lookup.receipt)
            if number >= _WARM_UP:
                for leg, seconds in taken:
                    times.setdefault(leg, []).append(seconds)
        for one in (index, silent):
            one.leave(_OWNER)
    return {
        "schema": 1,
        "name": "bench index",
        "context": CONTEXT,
        "rounds": rounds,
        "server": f"{told.get('server_name', 'redis')} {told.get('valkey_version', told['redis_version'])}",
        "transport": "Unix socket" if url.startswith(("unix:", "embedded:")) else "TCP",
        "bar": BAR,
        "rows": [_row(leg, taken, times[f"bare {leg}"]) for leg, taken in times.items() if not leg.startswith("bare ")],
    }


def report(document: dict[str, Any]) -> None:
    """A table for people on stderr, one JSON line for machines as the last line of stdout."""
    table = Table(title=f"index operations, {document['server']}, {document['transport']}")
    for name in ("operation", "p50 us", "p95 us", "bare p50 us", "bare p95 us", "ratio"):
        table.add_column(name, justify="right")
    for row in document["rows"]:
        table.add_row(
            row["operation"],
            f"{row['p50_us']:.1f}",
            f"{row['p95_us']:.1f}",
            f"{row['bare_p50_us']:.1f}",
            f"{row['bare_p95_us']:.1f}",
            f"{row['ratio']:.2f}x",
        )
    Console(stderr=True).print(table)
    sys.stdout.write(json.dumps(document) + "\n")


@contextlib.contextmanager
def _opened(url: str, *, share_recipes: bool) -> Iterator[RedisIndex]:
    index = open_index(url, secrets.token_hex(32), share_recipes=share_recipes)
    try:
        if not isinstance(index, RedisIndex):
            raise ConfigError(f"{url.partition('://')[0]}:// has no server to measure; give the URL of one")
        yield index
    finally:
        index.close()


def _extent(index: RedisIndex, ids: tuple[int, ...], namespace: str) -> tuple[ExtentRecord, Query]:
    """One extent that holds the whole context, and the query for it."""
    hashes = block_hashes(namespace, ids)
    end_id = prefix_id(namespace, ids, len(ids), hashes)
    record = ExtentRecord(
        extent_id=index.next_extent_id(),
        start=0,
        stop=len(ids),
        token_ids=ids,
        end_id=end_id,
        hashes=hashes,
        canonical_stop=len(ids) // BLOCK_TOKENS * BLOCK_TOKENS,
        parent=None,
        place=Place(_OWNER, Allocation(0, 1 << 20, 1)),
        checksum="0" * 32,
    )
    return record, Query((*ids,), hashes)


def _row(operation: str, taken: list[float], bare: list[float]) -> dict[str, Any]:
    p50, base = statistics.median(taken), statistics.median(bare)
    p95, base_p95 = (statistics.quantiles(times, n=20, method="inclusive")[18] for times in (taken, bare))
    return {
        "operation": operation,
        "p50_us": round(p50 * 1e6, 1),
        "p95_us": round(p95 * 1e6, 1),
        "bare_p50_us": round(base * 1e6, 1),
        "bare_p95_us": round(base_p95 * 1e6, 1),
        "ratio": round(p50 / base, 3),
    }
