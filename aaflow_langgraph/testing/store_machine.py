"""A Hypothesis state machine over extents at every tier, in one or two processes' worth of stores. Shipped for new backends.

Oracle: a plain dict of what was ever published, and a function from token ids to bytes that shares no code with the package,
so that a read of anything else than what was asked for is seen. Nothing here loads a model.

    reserve  commit  abort  lookup  lease  renew  release  fork  append  compact  spill  fetch  evict  tick  crash  reopen

To run it over a backend of yours, subclass and say how an index is made:

    class MyMachine(StoreMachine):
        def make_index(self) -> Index:
            return MyIndex(..., clock=self.clock)

    TestMyMachine = MyMachine.TestCase

``make_index`` is called once for each store. Indexes with ``shared = True`` must all see one and the same set of extents,
empty at first; two stores then read each other's pools in place.
"""

from __future__ import annotations

import shutil
import tempfile
from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from aaflow_langgraph.compaction import Compactor
from aaflow_langgraph.errors import LeaseExpired
from aaflow_langgraph.evict.lru import least_recently_used
from aaflow_langgraph.index.base import Index, Match
from aaflow_langgraph.keeper import Keeper
from aaflow_langgraph.model import BLOCK_TOKENS, KVLayout
from aaflow_langgraph.pool.arena import Allocation
from aaflow_langgraph.pool.base import Pool
from aaflow_langgraph.pool.device import DeviceTier
from aaflow_langgraph.pool.disk import DiskPool
from aaflow_langgraph.pool.host import HostPool
from aaflow_langgraph.pool.peers import Peers
from aaflow_langgraph.pool.shared import SharedPool
from aaflow_langgraph.store import LEASE_S, OWNER_LEASE_S, SHARED_LEASE_S, ExtentStore, TokenSequence
from aaflow_langgraph.testing.clock import ManualClock

LAYOUT = KVLayout(num_layers=1, num_kv_heads=2, head_dim=4, dtype="float32", itemsize=4)
NAMESPACE = "5" * 64
POOL_TOKENS = 1400
DISK_TOKENS = 6000
LONGEST = 3 * BLOCK_TOKENS + 40
# Sequences that share long fronts: the second leaves the first in its second block, the third at a block's border.
LINES = [
    tuple((7 * n) % 251 for n in range(LONGEST)),
    tuple((7 * n) % 251 if n < 300 else (11 * n) % 241 for n in range(LONGEST)),
    tuple((7 * n) % 251 if n < 512 else (13 * n) % 239 for n in range(LONGEST)),
    tuple((5 * n) % 257 for n in range(LONGEST)),
]
SIZES = (1, 40, 255, 256, 257, 300, 512, 700, LONGEST)


def content(token_ids: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
    """The bytes that ``[start, stop)`` of a sequence must have: every number depends on all tokens up to its position."""
    named, at = [], 1
    for token in token_ids[:stop]:
        at = (at * 48271 + token + 1) % 2147483647 % 16777213  # below 2**24: exact in fp32
        named.append(float(at))
    row = torch.tensor(named[start:stop])
    shape = LAYOUT.shape(stop - start)
    offsets = torch.arange(shape[0] * shape[1] * shape[2] * shape[4]).reshape(*shape[:3], 1, shape[4]) / 64
    return (row[:, None] + offsets).contiguous()


@dataclass(eq=False, slots=True)
class Work:
    """What a request is about to publish: ``[start, stop)`` of a line, in reserved bytes."""

    store: Site
    life: int
    line: int
    start: int
    stop: int
    canonical: bool
    allocation: Allocation


@dataclass(eq=False, slots=True)
class Reading:
    """An open lease: what was matched, of which line."""

    store: Site
    life: int
    line: int
    match: Match


class Site:
    """One store with what belongs to its process; ``crash`` ends it as SIGKILL would."""

    def __init__(self, machine: StoreMachine) -> None:
        self.machine = machine
        self.life = 0
        self.open()

    def open(self) -> None:
        """A process starts."""
        machine = self.machine
        self.life += 1
        self.index = machine.make_index()
        num_bytes = LAYOUT.num_bytes(POOL_TOKENS)
        self.peers = Peers(machine.run_dir) if self.index.shared else None
        pool: Pool = SharedPool(num_bytes, run_dir=machine.run_dir) if self.index.shared else HostPool(num_bytes)
        self.disk = DiskPool(machine.folder / "disk", NAMESPACE, LAYOUT, LAYOUT.num_bytes(DISK_TOKENS))
        self.store = ExtentStore(
            NAMESPACE,
            LAYOUT,
            self.index,
            pool,
            least_recently_used,
            peers=self.peers,
            disk=self.disk,
            device_tier=machine.make_device_tier(),
        )
        self.store.announce_disk()
        self.keeper = Keeper(self.store, least_recently_used, clock=machine.clock)
        self.keeper.compactor = Compactor(self.store, longest=1)
        self.store.when_long = self.keeper.compactor.note  # no thread: the machine ticks

    def crash(self) -> None:
        """It says nothing to anybody: its memory and its connections are gone, its entries in the index are not."""
        self.store.pool.close()
        if self.peers is not None:
            self.peers.close()
        self.disk.close()

    def close(self) -> None:
        """It ends in order."""
        self.store.close()


class StoreMachine(RuleBasedStateMachine):
    """See the module."""

    works = Bundle("works")
    readings = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.clock = ManualClock()
        self.folder = Path(tempfile.mkdtemp(prefix="aaflow-machine-"))
        self.run_dir = self.folder / "run"
        first = Site(self)
        self.sites = [first, Site(self)] if first.index.shared else [first]
        self.published: dict[tuple[int, ...], set[bool]] = {}

    @abstractmethod
    def make_index(self) -> Index:
        """The index of one more store."""

    def make_device_tier(self) -> DeviceTier | None:
        """What one more store reads its pool through; None when it reads in place."""
        return None

    # ------------------------------------------------------------------ helpers

    def sequence(self, site: Site, line: int, size: int = LONGEST) -> TokenSequence:
        """The front of a line."""
        return site.store.sequence(LINES[line][:size])

    def borders(self) -> list[int]:
        """Where extents may end inside a block."""
        return [size for size in SIZES if size % BLOCK_TOKENS]

    def drawn(self, number: int) -> Site:
        """A site by any number."""
        return self.sites[number % len(self.sites)]

    def read(self, site: Site, line: int, match: Match) -> bool:
        """Read all of a match, then ask whether it may be used; if so it must be right (I4, I7, I14)."""
        pieces = [(site.store.piece(*part).kv.clone(), part[1], part[2]) for part in match.parts]
        try:
            site.store.verify(match.receipt, [record for record, _, _ in match.parts])
        except LeaseExpired:
            return False
        for kv, start, stop in pieces:
            assert torch.equal(kv, content(LINES[line], start, stop)), f"wrong bytes in [{start}, {stop})"
        return True

    # ------------------------------------------------------------------ rules

    @initialize()
    def something_to_share(self) -> None:
        """A first long context."""
        self.commit(self.reserve(0, 0, 700, False))

    @rule(
        target=works, site=st.integers(0, 1), line=st.integers(0, 3), size=st.sampled_from(SIZES), fresh=st.booleans()
    )
    def reserve(self, site: int, line: int, size: int, fresh: bool) -> object:
        """Append to what is there, or start over; the bytes are written at once and seen by nobody."""
        at = self.drawn(site)
        sequence = self.sequence(at, line, size)
        start = 0 if fresh else at.store.covered(sequence, size, self.borders())
        if start >= size:
            return multiple()
        allocation = at.store.reserve(size - start)
        if allocation is None:
            return multiple()
        at.store.tensor(allocation, size - start).copy_(content(LINES[line], start, size))
        return Work(at, at.life, line, start, size, fresh and size >= BLOCK_TOKENS, allocation)

    @rule(work=consumes(works))
    def commit(self, work: object) -> None:
        """Publish; what is published is found by an equal lookup as long as its writer's lease lasts."""
        if not isinstance(work, Work) or work.life != work.store.life:
            return  # its process is gone
        store, sequence = work.store.store, self.sequence(work.store, work.line, work.stop)
        canonical = work.stop // BLOCK_TOKENS * BLOCK_TOKENS if work.canonical else 0
        sealed = store.publish(sequence, work.start, work.stop, work.allocation, canonical, None)
        assert sealed is not None
        record, receipt = sealed
        self.published.setdefault(LINES[work.line][: work.stop], set()).add(work.canonical)
        assert torch.equal(
            store.piece(record, work.start, work.stop).kv, content(LINES[work.line], work.start, work.stop)
        )
        assert (record.start, record.stop) == (work.start, work.stop)
        assert store.release(receipt)

    @rule(work=consumes(works))
    def abort(self, work: object) -> None:
        """Give unpublished bytes back."""
        if isinstance(work, Work) and work.life == work.store.life:
            work.store.store.free(work.allocation)

    @rule(
        site=st.integers(0, 1), line=st.integers(0, 3), limit=st.sampled_from((*SIZES, 5000)), canonical=st.booleans()
    )
    def lookup(self, site: int, line: int, limit: int, canonical: bool) -> None:
        """Whatever is found is right, gap-free, and was published once; from disk it is fetched."""
        at = self.drawn(site)
        match = at.store.match(self.sequence(at, line), limit, canonical=canonical, borders=self.borders())
        assert match.stop <= limit
        assert [start for _, start, _ in match.parts] == [0, *(stop for _, _, stop in match.parts)][: len(match.parts)]
        front = LINES[line][: match.stop]
        assert not front or any(ids[: len(front)] == front for ids in self.published)
        if canonical:
            assert match.stop % BLOCK_TOKENS == 0 or match.stop == limit
        assert self.read(at, line, match)
        assert at.store.release(match.receipt)

    @rule(target=readings, site=st.integers(0, 1), line=st.integers(0, 3))
    def lease(self, site: int, line: int) -> Reading:
        """Begin to read and go on with other things."""
        at = self.drawn(site)
        match = at.store.match(self.sequence(at, line), LONGEST, borders=self.borders())
        return Reading(at, at.life, line, match)

    @rule(reading=readings)
    def renew(self, reading: Reading) -> None:
        """The keeper does this; a lost lease is noticed by the next check."""
        if reading.life == reading.store.life:
            reading.store.store.leases.renew_old()

    @rule(target=readings, reading=consumes(readings), release=st.booleans())
    def read_on(self, reading: Reading, release: bool) -> object:
        """However long ago it was leased: right bytes, or none."""
        if reading.life != reading.store.life:
            return multiple()  # its process is gone
        right = self.read(reading.store, reading.line, reading.match)
        if right and not release:
            return reading
        reading.store.store.release(reading.match.receipt)
        return multiple()

    @rule(target=readings, reading=readings)
    def fork(self, reading: Reading) -> object:
        """Another reader of the same extents: zero bytes."""
        if reading.life != reading.store.life:
            return multiple()
        used = reading.store.store.pool.used_bytes
        match = reading.store.store.match(
            self.sequence(reading.store, reading.line), reading.match.stop, borders=self.borders()
        )
        if reading.store.store.counts.fetches == 0 and reading.store.store.counts.evictions == 0:
            assert reading.store.store.pool.used_bytes == used
        return Reading(reading.store, reading.life, reading.line, match)

    @rule(site=st.integers(0, 1), line=st.integers(0, 3), sizes=st.sets(st.sampled_from(SIZES), min_size=1, max_size=3))
    def compact(self, site: int, line: int, sizes: set[int]) -> None:
        """Grow a chain, then merge what a lookup found: the next one finds as much, in fewer parts where something was merged,
        and nobody was evicted for it.
        """
        at, size = self.drawn(site), max(sizes)
        for stop in sorted(sizes):
            self.commit(self.reserve(site, line, stop, False))
        sequence = self.sequence(at, line, size)
        match = at.store.match(sequence, size, borders=self.borders())
        assert at.store.release(match.receipt)
        counts = (at.store.counts.evictions, at.store.counts.compactions)
        at.keeper.compactor.note(sequence, self.borders(), match)
        at.keeper.compactor.tick()
        assert at.store.counts.evictions == counts[0]
        again = at.store.match(sequence, size, borders=self.borders())
        assert again.stop >= match.stop  # more where there was no room to fetch the rest, and is now
        if again.stop == match.stop:
            assert len(again.parts) <= len(match.parts) - (at.store.counts.compactions - counts[1])
        assert self.read(at, line, again)
        assert at.store.release(again.receipt)

    @rule(site=st.integers(0, 1))
    def spill(self, site: int) -> None:
        """Write-behind: afterwards what was published since has its copy on disk. What was removed from there is written again
        only when it leaves the pool.
        """
        at = self.drawn(site)
        published = set(at.store.unsaved)
        at.keeper.write_behind()
        assert not at.store.unsaved
        assert all(at.store.is_saved(at.store.mine[number]) for number in published if number in at.store.mine)

    @rule(site=st.integers(0, 1))
    def keep(self, site: int) -> None:
        """One round of the background: heartbeat, renewals, sweep, adoption, spill, watermarks."""
        self.drawn(site).keeper.tick()

    @rule(site=st.integers(0, 1), line=st.integers(0, 3), from_disk=st.booleans())
    def evict(self, site: int, line: int, from_disk: bool) -> None:
        """Frees what it says it frees."""
        at = self.drawn(site)
        used = at.store.pool.used_bytes
        freed = at.store.evict(self.sequence(at, line), self.borders(), from_disk=from_disk)
        assert at.store.pool.used_bytes == used - freed

    @rule(seconds=st.sampled_from([1.0, SHARED_LEASE_S, OWNER_LEASE_S, LEASE_S]))
    def tick(self, seconds: float) -> None:
        """Time passes; leases and owners that nobody renewed run out."""
        self.clock.advance(seconds)

    @rule(site=st.integers(0, 1), reopen=st.booleans())
    def crash(self, site: int, reopen: bool) -> None:
        """A process is killed and another one starts."""
        at = self.drawn(site)
        if not at.index.shared:
            return self.reopen(site)  # the index of one process dies with it
        at.crash()
        at.open()
        return None

    @rule(site=st.integers(0, 1))
    def reopen(self, site: int) -> None:
        """A process ends in order and another one starts."""
        at = self.drawn(site)
        at.close()
        at.open()

    # ------------------------------------------------------------------ invariants

    @invariant()
    def nothing_is_broken(self) -> None:
        """I1-I8, I10, I11 as the stores see them."""
        for site in self.sites:
            # An owner whose time is up is fenced until its next heartbeat: what it holds is announced by then.
            site.store.beat()
            assert site.store.check() == []
            assert site.store.pool.used_bytes <= site.store.pool.peak_bytes <= site.store.pool.capacity_bytes
            published = sum(r.place.allocation.num_bytes for r in site.store.mine.values() if r.place is not None)
            assert site.store.pool.used_bytes >= published

    def teardown(self) -> None:
        """Everybody leaves: what is left is whole files, and nothing else."""
        for site in self.sites:
            site.close()
        self.clock.advance(LEASE_S)
        last = self.make_index()
        last.sweep()
        assert last.num_leases() == 0
        assert last.owners() == {}
        assert all(record.place is None and record.on_disk for record in last.records())
        assert last.check() == []
        last.close()
        shutil.rmtree(self.folder)
