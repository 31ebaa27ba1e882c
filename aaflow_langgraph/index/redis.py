"""The index of many processes: a dozen keys of one namespace on a Redis server, one script per operation.

Times are the server's (C10). What a script does, it does whole. Everything read is checked before it is believed: an entry
that is malformed, or whose hashes or tokens are not the query's, is a miss and a finding, never KV (S3).
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from aaflow_langgraph.errors import Fenced, IntegrityError, LeaseExpired
from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.index import _replies as replies
from aaflow_langgraph.index import _wire as wire
from aaflow_langgraph.index._server import Server
from aaflow_langgraph.index._snapshot import findings
from aaflow_langgraph.index.base import ExtentRecord, Match, Place, Query, Swept, cover
from aaflow_langgraph.model import BLOCK_TOKENS, Receipt, Recipe

_CACHED_TOKENS = 1 << 20
"""Token ids of this many tokens are remembered (about 40 MB), so that a warm lookup is one round trip."""
_FETCH = 500
"""Extents asked for in one script call."""
_PROOFS = 16
"""Lookups whose proof is remembered, by the very token ids that were asked for: a request asks for the same ones several
times, and comparing 4,096 of them again takes half as long as asking."""
_ATTEMPTS = 4
"""Lookups until entries that are not what they say are given up on; each attempt leaves out what was found out."""


class _Proof(NamedTuple):
    """The reply to a lookup, and the extents that it was proved to mean. Of an equal reply to the same lookup they are the
    same.
    """

    query: Query
    limit: int
    asked: tuple[int, str, str]
    reply: list[Any]
    parts: tuple[tuple[ExtentRecord, int, int], ...]
    stop: int
    extent_ids: tuple[int, ...]


class RedisIndex:
    """See ``Index`` for the contract; ``open_index`` opens one.

    Args:
        server: Where it lives.
        share_recipes: Keep token ids and recipes on the server. Without, block hashes alone vouch for extents, and recipes
            stay in their process.

    Attributes:
        server: Where it lives.
        num_malformed: Entries that were not what they said, or went while they were read; each was a miss.
    """

    shared = True

    def __init__(self, server: Server, *, share_recipes: bool = True) -> None:
        self.num_malformed = 0
        self.server = server
        self._shares = share_recipes
        self._lock = threading.Lock()
        self._last_id = 0
        self._last_epoch = 0
        self._known: OrderedDict[int, tuple[bytes, ExtentRecord]] = OrderedDict()
        self._known_tokens = 0
        self._proofs: OrderedDict[int, _Proof] = OrderedDict()

    # ---------------------------------------------------------------- owners

    def join(self, owner: str, lease_s: float) -> int:
        wire.require_name("an owner", owner)
        epoch = replies.count(self.server.run("join", owner, repr(lease_s), str(self._last_epoch)))
        with self._lock:
            self._last_epoch = max(self._last_epoch, epoch)
        return epoch

    def heartbeat(self, owner: str, epoch: int, lease_s: float) -> bool:
        return replies.flag(self.server.run("heartbeat", owner, str(epoch), repr(lease_s)))

    def leave(self, owner: str) -> int:
        return replies.count(self.server.run("leave", wire.require_name("an owner", owner)))

    def owners(self) -> dict[str, float]:
        now, *rest = replies.items(self.server.run("owners"))
        return {
            replies.text(name).decode("ascii", "replace"): replies.seconds(at) - replies.seconds(now)
            for name, at in zip(rest[::2], rest[1::2], strict=True)
        }

    # ---------------------------------------------------------------- extents

    def next_extent_id(self) -> int:
        """Time-ordered and made without a round trip: microseconds and 12 random bits. ``put`` draws again on a collision."""
        drawn = time.time_ns() // 1000 << 12 | secrets.randbits(12)
        with self._lock:
            self._last_id = max(drawn, self._last_id + 1)
            return self._last_id

    def put(self, record: ExtentRecord, epoch: int, lease_s: float) -> tuple[ExtentRecord, Receipt]:
        place = record.place
        if place is not None:
            wire.require_name("an owner", place.owner)
        lease_id = secrets.token_hex(16)
        packed = wire.to_tokens(record.token_ids) if self._shares else b""
        reply = [b"taken"]
        while reply == [b"taken"]:
            reply = replies.items(
                self.server.run(
                    "put",
                    lease_id,
                    repr(lease_s),
                    wire.to_id(record.extent_id),
                    str(epoch),
                    "-" if place is None else place.owner,
                    wire.to_range(place),
                    "-" if record.parent is None else wire.to_id(record.parent),
                    "1" if record.on_disk else "0",
                    wire.to_record(record),
                    packed,
                )
            )
            if reply == [b"taken"]:
                record = replace(record, extent_id=self.next_extent_id())
        if reply == [b"fenced"]:
            owner = place.owner[:12] if place else ""
            raise Fenced(f"owner {owner} is not registered under epoch {epoch}: join and announce again")
        deadline, raw_id, state, *there = replies.items(reply, 3 if len(reply) < 4 else 4)
        extent_id = wire.from_id(raw_id)
        known = self._known.get(extent_id)
        kept = known[1] if known is not None else record
        if there and known is None:
            # Of equal key, so of equal tokens; only its bytes, and with them the checksum, may differ.
            kept = replace(wire.from_record(extent_id, there[0], None), token_ids=record.token_ids)
        if not self._shares:
            kept = replace(kept, token_ids=())
        kept = self._remember(kept, state)
        return kept, Receipt(lease_id, (extent_id,), replies.seconds(deadline))

    def match(self, query: Query, limit: int, lease_s: float) -> Match:
        distrusted: list[int] = []
        for _ in range(_ATTEMPTS if limit > 0 else 0):
            lease_id = secrets.token_hex(16)
            known = self._proofs.get(id(query.token_ids))
            if known is not None and not (known.query == query and known.limit == limit):
                known = None
            num_blocks, names, ends = _asked(query, limit) if known is None else known.asked
            knows_nothing = not self._known  # then one round trip brings all of it
            what = f"{limit} {query.canonical:d} {knows_nothing:d} {num_blocks}"
            left_out = " ".join(map(wire.to_id, distrusted))
            reply = replies.items(self.server.run("match", lease_id, repr(lease_s), what, names, ends, left_out))
            if not reply:
                break
            fresh = reply.pop() if knows_nothing else None
            deadline_s = replies.seconds(reply[0])
            if known is not None and known.reply[1:] == reply[1:]:
                return Match(known.parts, known.stop, Receipt(lease_id, known.extent_ids, deadline_s))
            spans, lines = replies.spans(reply[1:])
            if fresh is not None:
                read = self._read([extent_id for extent_id, _ in lines], *replies.items(fresh, 2))
            else:
                read = self._fetch([extent_id for extent_id, _ in lines if extent_id not in self._known])
            # The same rule once more over what came back: hashes, tokens, order and borders are proved, not believed.
            parts, stop = cover(self._placed(lines, read), query, limit)
            if [(record.extent_id, a, b) for record, a, b in parts] == spans:
                extent_ids = tuple([span[0] for span in spans])
                self._keep(_Proof(query, limit, (num_blocks, names, ends), reply, parts, stop, extent_ids))
                return Match(parts, stop, Receipt(lease_id, extent_ids, deadline_s))
            self.server.run("release", lease_id)
            self.num_malformed += 1
            # The first part that is not what the reply says was chosen on a lie.
            proved = [(record.extent_id, a, b) for record, a, b in parts]
            distrusted.append(
                next(span[0] for number, span in enumerate(spans) if proved[number : number + 1] != [span])
            )
        return Match((), 0, Receipt(secrets.token_hex(16), (), 0.0))

    def covering(self, query: Query) -> list[ExtentRecord]:
        names = "".join((*query.hashes, *(end_id for _, end_id in query.tails)))
        return self._records(replies.states(self.server.run("covering", names))) if names else []

    def remove(self, extent_id: int, owner: str) -> ExtentRecord | None:
        needs_record = extent_id not in self._known
        reply = self.server.run("remove", wire.to_id(extent_id), owner, "1" if needs_record else "0")
        if reply is None:
            return None
        known = self._cut(extent_id)
        state, raw, packed = (*replies.items(reply), None, None)[:3]
        if known is None:
            return wire.placed(wire.from_record(extent_id, raw, packed), wire.from_state(state))
        return known[1] if known[0] == state else wire.placed(known[1], wire.from_state(state))

    def move(self, extent_id: int, old: Place | None, new: Place, epoch: int) -> bool:
        wire.require_name("an owner", new.owner)
        moved = self.server.run(
            "move", wire.to_id(extent_id), wire.to_place(old), new.owner, wire.to_range(new), str(epoch)
        )
        if moved == -1:
            raise Fenced(f"owner {new.owner[:12]} is not registered under epoch {epoch}: join and announce again")
        return replies.flag(moved)

    def take_over(self, extent_id: int, part_ids: Sequence[int]) -> bool:
        return replies.flag(self.server.run("take_over", wire.to_id(extent_id), *map(wire.to_id, part_ids)))

    def lose(self, extent_id: int, place: Place) -> bool:
        return replies.flag(self.server.run("lose", wire.to_id(extent_id), wire.to_place(place)))

    def set_on_disk(self, extent_id: int, on_disk: bool) -> bool:
        return replies.flag(self.server.run("set_on_disk", wire.to_id(extent_id), "1" if on_disk else "0"))

    def candidates(self, owner: str) -> list[Candidate]:
        found = []
        for extent_id, rest in replies.lines(self.server.run("candidates", wire.require_name("an owner", owner))):
            try:
                line, created, last, uses = rest.rsplit(b" ", 3)
                state = wire.from_state(line)
                if state.place is None:
                    raise IntegrityError("an extent is owned and has no place")
                found.append(
                    Candidate(
                        extent_id,
                        state.place.allocation.num_bytes,
                        state.stop - state.start,
                        last_used=replies.count(last),
                        num_uses=replies.count(uses),
                        created=replies.count(created),
                        start=state.start,
                    )
                )
            except (IntegrityError, ValueError):
                self.num_malformed += 1
        return found

    def records(self, owner: str | None = None) -> list[ExtentRecord]:
        if owner is not None:
            wire.require_name("an owner", owner)
        return self._records(replies.states(self.server.run("records", owner or "")))

    # ---------------------------------------------------------------- leases

    def renew(self, receipt: Receipt, lease_s: float) -> Receipt:
        reply = self.server.run("renew", receipt.lease_id, repr(lease_s))
        if reply is None:
            raise LeaseExpired(f"lease on {len(receipt.extent_ids)} extents is gone: it ran out or was released")
        deadline, *ids = replies.text(reply).split()
        return Receipt(receipt.lease_id, tuple([wire.from_id(raw) for raw in ids]), replies.seconds(deadline))

    def release(self, receipt: Receipt) -> bool:
        if not receipt.extent_ids and not receipt.deadline_s:
            return True  # of a miss, which left nothing behind
        return replies.flag(self.server.run("release", receipt.lease_id)) or not receipt.extent_ids

    def num_leases(self) -> int:
        return replies.count(self.server.run("num_leases"))

    def sweep(self) -> Swept:
        return Swept(*(replies.count(number) for number in replies.items(self.server.run("sweep"), 3)))

    # ---------------------------------------------------------------- claims and recipes

    def claim(self, name: str, holder: str, lease_s: float) -> bool:
        wire.require_name("a claim", name)
        wire.require_name("a holder", holder)
        return replies.flag(self.server.run("claim", name, holder, repr(lease_s)))

    def unclaim(self, name: str, holder: str) -> bool:
        return replies.flag(self.server.run("unclaim", name, holder))

    def put_recipe(self, recipe: Recipe, lease_s: float) -> None:
        if self._shares:
            wire.require_digest("a kv_id", recipe.kv_id)
            chat = "1" if recipe.has_chat else "0"
            self.server.run("put_recipe", recipe.kv_id, repr(lease_s), chat, wire.to_recipe(recipe))

    def recipe(self, kv_id: str) -> Recipe | None:
        if not self._shares:
            return None
        raw = self.server.run("recipe", wire.require_digest("a kv_id", kv_id))
        try:
            return None if raw is None else wire.from_recipe(kv_id, raw)
        except IntegrityError:
            self.num_malformed += 1
            return None

    # ---------------------------------------------------------------- inspection

    def check(self) -> list[tuple[str, str]]:
        return findings(replies.items(self.server.run("snapshot")))

    def close(self) -> None:
        self.server.close()

    # ---------------------------------------------------------------- inside

    def _records(self, lines: Iterable[tuple[int, bytes]]) -> list[ExtentRecord]:
        """Records of (id, state); unknown ones are fetched, unreadable ones counted and left out."""
        wanted = list(lines)
        return self._placed(wanted, self._fetch([extent_id for extent_id, _ in wanted if extent_id not in self._known]))

    def _placed(self, lines: Iterable[tuple[int, bytes]], read: dict[int, ExtentRecord]) -> list[ExtentRecord]:
        """Records of (id, state), from what is known and what was just read."""
        found = []
        for extent_id, state in lines:
            known = self._known.get(extent_id)
            record = known[1] if known is not None else read.get(extent_id)
            if record is None:
                self.num_malformed += 1
            elif known is not None and known[0] == state:
                with self._lock:
                    if extent_id in self._known:
                        self._known.move_to_end(extent_id)
                found.append(record)
            else:
                try:
                    found.append(self._remember(record, state))
                except IntegrityError:
                    self.num_malformed += 1
        return found

    def _fetch(self, missing: Sequence[int]) -> dict[int, ExtentRecord]:
        """The unchanging parts of extents; what cannot be read is left out."""
        found = {}
        for first in range(0, len(missing), _FETCH):
            batch = missing[first : first + _FETCH]
            found.update(self._read(batch, *replies.items(self.server.run("fetch", *map(wire.to_id, batch)), 2)))
        return found

    def _read(self, extent_ids: Sequence[int], raws: Any, packed: Any) -> dict[int, ExtentRecord]:
        """The unchanging parts of extents as they came back, in order; what cannot be read is left out."""
        found = {}
        rows = zip(
            extent_ids, replies.items(raws, len(extent_ids)), replies.items(packed, len(extent_ids)), strict=True
        )
        for extent_id, raw, tokens in rows:
            try:
                found[extent_id] = wire.from_record(extent_id, raw, tokens if self._shares else None)
            except IntegrityError:
                continue
        return found

    def _remember(self, record: ExtentRecord, raw_state: bytes) -> ExtentRecord:
        """The record at the place that ``raw_state`` says; kept for the next time."""
        record = wire.placed(record, wire.from_state(raw_state))
        with self._lock:
            if record.extent_id not in self._known:
                self._known_tokens += record.num_tokens
            self._known[record.extent_id] = (raw_state, record)
            while self._known_tokens > _CACHED_TOKENS and len(self._known) > 1:
                self._known_tokens -= self._known.popitem(last=False)[1][1].num_tokens
        return record

    def _keep(self, proof: _Proof) -> None:
        """Remember what a query was proved to be answered by."""
        with self._lock:
            self._proofs.pop(id(proof.query.token_ids), None)
            self._proofs[id(proof.query.token_ids)] = (
                proof  # which keeps the ids alive, so nothing else gets their number
            )
            while len(self._proofs) > _PROOFS:
                self._proofs.popitem(last=False)

    def _cut(self, extent_id: int) -> tuple[bytes, ExtentRecord] | None:
        """Take an extent out of memory, with the state that it was last read in."""
        with self._lock:
            known = self._known.pop(extent_id, None)
            if known is None:
                return None
            self._known_tokens -= known[1].num_tokens
            return known


def _asked(query: Query, limit: int) -> tuple[int, str, str]:
    """The number of blocks to look up, their names and those of positions inside blocks, last first, and those positions.
    Blocks behind the one that ``limit`` cuts find nothing that it does not.
    """
    num_blocks = min(len(query.hashes), -(-limit // BLOCK_TOKENS))
    names = "".join(query.hashes[num_blocks - 1 :: -1]) if num_blocks else ""
    if not query.tails or query.canonical:
        return num_blocks, names, ""
    bound = -(-limit // BLOCK_TOKENS) * BLOCK_TOKENS
    ends = sorted([tail for tail in query.tails if tail[0] <= bound], reverse=True)
    return num_blocks, names + "".join([end_id for _, end_id in ends]), " ".join([str(stop) for stop, _ in ends])
