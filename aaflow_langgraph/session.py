"""One request: a leased past, a private tail, a run of the engine over both.

After every forward the leases are verified before anything is shown to anybody: if an extent was lost while it was being
read (a process paused beyond its lease), what was computed from it is thrown away, the past is rebuilt and the forward
repeated. Knows a store and an engine; knows no prompts and no handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from aaflow_langgraph.engine.base import GRID_TOKENS, Engine, Piece, Run, chunk_spans
from aaflow_langgraph.engine.mixed import Mixed
from aaflow_langgraph.errors import LeaseExpired
from aaflow_langgraph.index.base import ExtentRecord, Match
from aaflow_langgraph.inflight import Claim
from aaflow_langgraph.model import BLOCK_TOKENS, Receipt
from aaflow_langgraph.store import ExtentStore, TokenSequence
from aaflow_langgraph.tail import PoolTail

Result = TypeVar("Result")

_MAX_FAILURES = 3
"""So often a past is rebuilt under leases; after that the request computes it in memory of its own."""


@dataclass(slots=True)
class _Held:
    """A lease and the extents read under it."""

    receipt: Receipt
    records: tuple[ExtentRecord, ...]


class Session:
    """Runs tokens of one sequence. Use as a context manager: leaving it releases every lease and drops what is unsealed.

    Args:
        canonical: Read canonical blocks only and cut the past at the grid, so that bits depend on token ids alone.
        publishes: Seal what was computed? Without, it is gone with the session.
        priority: Of its forwards among those of others.
        tick: Called before every forward; may raise to stop the request.
    """

    def __init__(
        self,
        engine: Engine,
        store: ExtentStore,
        *,
        canonical: bool,
        publishes: bool = True,
        priority: int = 0,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.num_reused = 0
        self.num_failures = 0
        self.num_shared = 0
        self.queued_s = 0.0
        self._engine = engine
        self._store = store
        self._canonical = canonical
        self._publishes = publishes
        self._priority = priority
        self.claim: Claim | None = None
        self._tick = tick
        self._held: list[_Held] = []
        self._owned: list[PoolTail] = []
        self._pieces: list[Piece] = []
        self._parent: int | None = None
        self._sequence = TokenSequence((), ())
        self._borders: Sequence[int] = ()
        self._tail: PoolTail | None = None
        self._run: Run | None = None
        self._num_copied = 0
        self._grid: int | None = None
        self._prefilled_stop = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def position(self) -> int:
        """Number of tokens whose KV exists for this request."""
        return self._live_tail.start + self._live_tail.length

    def tick(self) -> None:
        """Between forwards: keep the claim, stop if the request shall stop."""
        self._tick()
        if self.claim is not None:
            self.claim.renew()

    def begin(self, sequence: TokenSequence, limit: int, borders: Sequence[int], num_new: int) -> int:
        """Lease what covers the longest prefix of at most ``limit`` tokens; how many tokens that is.

        ``num_new`` tokens are expected behind the sequence: the tail gets room for them and for what is not covered, and for
        no more, because room for it may have to be made by eviction.
        """
        self._sequence, self._borders = sequence, borders
        if self._canonical:
            limit = limit // BLOCK_TOKENS * BLOCK_TOKENS
        match = self._lease(limit)
        self.num_reused = match.stop
        self._parent = match.parts[-1][0].extent_id if match.parts else None
        num_expected = max(1, len(sequence.token_ids) - match.stop + num_new)
        if self._canonical:
            start = match.stop // GRID_TOKENS * GRID_TOKENS
            self._pieces = self._grid_pieces(match, start)
            self._num_copied = match.stop - start
            self._tail = PoolTail(self._store, start, self._num_copied + num_expected)
            self._copy(match, self._tail, match.stop)
        else:
            self._pieces = [self._store.piece(*part) for part in match.parts]
            self._num_copied = 0
            self._tail = PoolTail(self._store, match.stop, num_expected)
        # A past that starts from nothing is canonical as it is: same chunks, same pieces.
        self._grid = GRID_TOKENS if self._canonical or match.stop == 0 else None
        self._run = self._start(self._pieces, self._tail)
        return match.stop

    def begin_beside(
        self,
        sequence: TokenSequence,
        limit: int,
        other: TokenSequence,
        num_shared: int,
        borders: Sequence[int],
        num_new: int,
    ) -> int:
        """``begin`` where another sequence shares the first ``num_shared`` tokens but is not a prefix; tokens reused.

        Whole blocks are read in place. The shared tokens behind the last of them are copied to the front of the tail, so
        that none is computed again and what is sealed still starts where a lookup can find it.
        """
        stop = self.begin(sequence, limit, (), num_new)
        tail = self._live_tail
        match = self._store.match(other, min(num_shared, limit), borders=borders)
        try:
            if match.stop > stop:
                self._copy(match, tail, match.stop)
                self._store.verify(match.receipt, [record for record, _, _ in match.parts])
                self.num_reused, self._grid = match.stop, None
                self._run = self._start(self._pieces, tail)
        except LeaseExpired:
            tail.length = 0  # lost while it was copied: computed like anything else
        finally:
            self._store.release(match.receipt)
        return self.num_reused

    def prefill(self, stop: int) -> torch.Tensor:
        """Run the sequence's tokens from the current position to ``stop`` (exclusive); logits after the last one."""
        logits: torch.Tensor | None = None
        self._live_tail.ensure(stop - self._live_tail.start)  # once, instead of growing chunk by chunk
        for a, b in chunk_spans(self.position, stop):
            chunk = self._sequence.token_ids[a:b]
            logits = self._guarded(lambda run, chunk=chunk: run.prefill(chunk))  # type: ignore[misc]
        if logits is None:
            raise ValueError(f"nothing to prefill between {self.position} and {stop}")
        self._prefilled_stop = stop
        return logits

    def fill(self, stop: int, write: Callable[[Mixed], None]) -> None:
        """Let ``write`` put the KV of the tokens from the current position to ``stop`` into the tail. It is called again when
        what it read was lost meanwhile, and may raise ``LeaseExpired`` to say so itself.
        """
        tail = self._live_tail
        tail.ensure(stop - tail.start)
        self._guarded(lambda _: write(Mixed(tuple(self._pieces), tail.kv[..., : stop - tail.start, :], tail.start)))
        tail.length = stop - tail.start
        self._grid = None
        self._run = self._start(self._pieces, tail)

    @property
    def pieces(self) -> list[Piece]:
        """Everything in front of the current position, without gaps. Prove with ``verify`` that what was read was that."""
        tail = self._live_tail
        own = [Piece(tail.kv[..., : tail.length, :], tail.start, self.position)] if tail.length else []
        return [*self._pieces, *own]

    def verify(self) -> None:
        """Make sure that everything read so far was what it was taken for.

        Raises:
            LeaseExpired: It was not. Way out: read again.
        """
        for held in self._held:
            self._store.verify(held.receipt, held.records)

    def decode(self, token_id: int) -> torch.Tensor:
        """Run one generated token; logits after it."""
        logits = self._guarded(lambda run: run.decode(token_id))
        self.num_shared += self._run is not None and self._run.was_shared
        return logits

    def seal(self, sequence: TokenSequence, stop: int) -> bool:
        """Publish what was computed up to ``stop``; False when the pool had no room (then it lives until ``close``), or when
        this session publishes nothing.

        ``sequence`` names at least the tokens computed. Nothing new up to ``stop``: nothing happens.
        """
        tail = self._live_tail
        if not self._publishes:
            return False
        tail.length = min(tail.length, stop - tail.start)
        if tail.length <= self._num_copied:
            return True
        start = tail.start + self._num_copied
        canonical_stop = self._prefilled_stop // BLOCK_TOKENS * BLOCK_TOKENS if self._grid else 0
        sealed = tail.seal(sequence, self._num_copied, canonical_stop if canonical_stop > start else 0, self._parent)
        if sealed is None:
            return False
        record, receipt = sealed
        self._held.append(_Held(receipt, (record,)))
        self._tail = None
        self._run = None
        self.end_claim()
        return True

    def split(self, num_expected: int) -> None:
        """Seal what was computed as an extent of its own and go on behind it in a new tail.

        What several requests share (a rebuilt parent) must not be buried in the extent of one of them.
        """
        tail, stop = self._live_tail, self.position
        if tail.length <= self._num_copied:
            return  # nothing was computed; an extent of no tokens would end the process in the attention kernel
        if self.seal(self._sequence, stop):
            record = self._held[-1].records[0]
            self._pieces.append(self._store.piece(record, tail.start, stop))
            self._parent = record.extent_id
        else:
            self._owned.append(tail)
            self._pieces.append(Piece(tail.kv[..., : tail.length, :], tail.start, stop))
        self._grid = None
        self._tail = PoolTail(self._store, stop, max(1, num_expected))
        self._run = self._start(self._pieces, self._tail)

    def close(self) -> None:
        """Release leases, drop unsealed memory. Idempotent."""
        for tail in (*self._owned, *([self._tail] if self._tail else [])):
            tail.drop()
        self._owned, self._tail, self._run, self._pieces = [], None, None, []
        self.end_claim()
        self._release()

    def end_claim(self) -> None:
        """Those who wait for what we compute go on: it is published, or they compute it themselves."""
        if self.claim is not None:
            self.claim.release()
            self.claim = None

    @property
    def _live_tail(self) -> PoolTail:
        if self._tail is None:
            raise ValueError("the session is not running: begin it first; after seal it is over")
        return self._tail

    def _start(self, pieces: Sequence[Piece], tail: PoolTail) -> Run:
        return self._engine.start(pieces, tail, grid=self._grid, priority=self._priority)

    def _guarded(self, forward: Callable[[Run], Result]) -> Result:
        """A forward whose reads were valid from beginning to end (I7); also one that finds out itself that they were not."""
        tail = self._live_tail
        length = tail.length
        while True:
            self.tick()
            if self._run is None:
                raise ValueError("the session is not running")
            try:
                result = forward(self._run)
                self.verify()
                return result
            except LeaseExpired:
                self.num_failures += 1
                tail.length = length
                self._rebuild(tail)

    def _rebuild(self, tail: PoolTail) -> None:
        """Lease or recompute everything in front of the tail's own tokens.

        What was copied to the front of the tail may have been read from lost bytes as well and is made again.
        """
        self._release()
        stop = tail.start + self._num_copied
        match = Match((), 0, Receipt("", (), 0.0)) if self.num_failures >= _MAX_FAILURES else self._lease(stop)
        self._parent = match.parts[-1][0].extent_id if match.parts else None
        if self._canonical:
            start = match.stop // GRID_TOKENS * GRID_TOKENS
            self._pieces = self._grid_pieces(match, start)
        else:
            start = match.stop
            self._pieces = [self._store.piece(*part) for part in match.parts]
        if start < stop:
            own = PoolTail(self._store, start, stop - start)
            self._owned.append(own)
            self._copy(match, own, match.stop)
            if match.stop < stop:
                run = self._start(self._pieces, own)
                run.prefill(self._sequence.token_ids[match.stop : stop])
            step = GRID_TOKENS if self._canonical else tail.start - start
            for at in range(start, tail.start, step or 1):
                self._pieces.append(Piece(own.kv[..., at - start : at - start + step, :], at, at + step))
            tail.kv[..., : self._num_copied, :] = own.kv[..., tail.start - start : stop - start, :]
        self._run = self._start(self._pieces, tail)

    def _lease(self, limit: int) -> Match:
        match = self._store.match(self._sequence, limit, canonical=self._canonical, borders=self._borders)
        if match.parts:
            self._held.append(_Held(match.receipt, tuple(record for record, _, _ in match.parts)))
        return match

    def _release(self) -> None:
        for held in self._held:
            self._store.release(held.receipt)
        self._held = []

    def _grid_pieces(self, match: Match, stop: int) -> list[Piece]:
        """``[0, stop)`` as one piece per grid cell: a view where one extent holds the cell, else a gathered copy."""
        pieces = []
        for cell in range(0, stop, GRID_TOKENS):
            end = cell + GRID_TOKENS
            whole = next(
                (r for r, _, _ in match.parts if r.start <= cell and end <= min(r.canonical_stop, r.stop)), None
            )
            if whole is not None:
                pieces.append(self._store.piece(whole, cell, end))
                continue
            gathered = PoolTail(self._store, cell, GRID_TOKENS)
            self._owned.append(gathered)
            self._copy(match, gathered, end)
            pieces.append(Piece(gathered.kv[..., :GRID_TOKENS, :], cell, end))
        return pieces

    def _copy(self, match: Match, tail: PoolTail, stop: int) -> None:
        """Copy the matched positions ``[tail.start, stop)`` to the front of ``tail``."""
        for record, a, b in match.parts:
            start, end = max(a, tail.start), min(b, stop)
            if start < end:
                tail.kv[..., start - tail.start : end - tail.start, :] = self._store.piece(record, start, end).kv
        tail.length = stop - tail.start
