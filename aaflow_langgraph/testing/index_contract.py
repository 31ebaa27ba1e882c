"""The contract of ``Index`` as tests. Subclass, say how an index is made, and let pytest collect the subclass.

Examples:
    class TestMyIndex(IndexContract):
        def make_index(self, clock: Callable[[], float]) -> Index:
            return MyIndex(clock=clock)

Token ids are made of letters, one per block, so that a reader sees what is shared: ``sequence("AAB", 40)`` are the blocks
A, A, B and 40 tokens of a tail.
"""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from aaflow_langgraph.errors import LeaseExpired
from aaflow_langgraph.hashing import block_hashes
from aaflow_langgraph.index.base import Index
from aaflow_langgraph.model import Receipt
from aaflow_langgraph.testing.clock import ManualClock
from aaflow_langgraph.testing.index_cases import (
    LEASE_S,
    NAMESPACE,
    OWNER,
    OWNER_LEASE_S,
    B,
    query,
    record,
    sequence,
    spans,
)
from aaflow_langgraph.testing.index_tiers_contract import TiersContract


class IndexContract(TiersContract, ABC):
    """What every index promises: right spans, leases that pin, receipts that free nothing of others, leaves first."""

    @abstractmethod
    def make_index(self, clock: Callable[[], float]) -> Index:
        """A fresh, empty index that reads the time from ``clock``."""

    @pytest.fixture
    def clock(self) -> ManualClock:
        """Time, moved by hand."""
        return ManualClock()

    @pytest.fixture
    def index(self, clock: ManualClock) -> Iterator[Index]:
        """An index without extents, joined by the first of two owners."""
        index = self.make_index(clock)
        self.epoch = index.join(OWNER, OWNER_LEASE_S)
        yield index
        index.close()

    def published(
        self,
        index: Index,
        ids: tuple[int, ...],
        start: int = 0,
        stop: int | None = None,
        *,
        canonical_stop: int = 0,
        parent: int | None = None,
        namespace: str = NAMESPACE,
    ) -> int:
        """Publish and give the writer's lease back; the extent's id."""
        made = record(index, ids, start, stop, canonical_stop=canonical_stop, parent=parent, namespace=namespace)
        kept, receipt = self.put(index, made)
        index.release(receipt)
        return kept.extent_id

    # ------------------------------------------------------------------ misses

    def test_a_miss_allocates_nothing(self, index: Index) -> None:
        """langgraph#8754: reads that find nothing leave no entries behind."""
        self.published(index, sequence("A"))
        before = (index.records(), index.num_leases(), index.candidates(OWNER))
        for ids in (sequence("B"), sequence("", 7), sequence("A")[:-1], sequence("BA")):
            match = index.match(query(ids), len(ids), LEASE_S)
            assert (match.parts, match.stop, match.receipt.extent_ids) == ((), 0, ())
            assert index.covering(query(ids)) == []
            index.release(match.receipt)
        assert (index.records(), index.num_leases(), index.candidates(OWNER)) == before
        assert index.sweep().num_leases == 0
        assert index.check() == []

    def test_a_limit_of_zero_is_a_miss(self, index: Index) -> None:
        """The whole prompt but nothing of it may be reused: no lease."""
        ids = sequence("A")
        self.published(index, ids)
        assert index.match(query(ids), 0, LEASE_S).receipt.extent_ids == ()
        assert index.num_leases() == 0

    # ------------------------------------------------------------------ spans

    def test_whole_blocks_are_found_by_their_hashes(self, index: Index) -> None:
        """A longer sequence, a shorter one, and one that leaves the stored one in the middle."""
        number = self.published(index, sequence("ABC"))
        for ids, stop in (
            (sequence("ABCD"), 3 * B),
            (sequence("AB"), 2 * B),
            (sequence("ABX"), 2 * B),
            (sequence("A", 9), B),
        ):
            match = index.match(query(ids), len(ids), LEASE_S)
            assert spans(match) == [(number, 0, stop)]
            assert match.stop == stop

    @pytest.mark.parametrize("size", [1, B - 1, B + 1, 2 * B - 1, 2 * B + 1])
    def test_a_tail_is_found_by_its_end_only(self, index: Index, size: int) -> None:
        """LMCache#5151: a partial block is a hit for those who know where it ends, else only its whole blocks are."""
        ids = sequence("AB", 9)[:size] if size <= 2 * B else sequence("AB", 1)
        number = self.published(index, ids)
        longer = ids + sequence("C")
        known = index.match(query(longer, len(ids)), len(longer), LEASE_S)
        assert spans(known) == [(number, 0, size)]
        unknown = index.match(query(longer), len(longer), LEASE_S)
        assert unknown.stop == size // B * B

    def test_a_limit_cuts_an_extent_anywhere(self, index: Index) -> None:
        """At most n - 1 tokens of a prompt that is a whole hit may be reused."""
        ids = sequence("AB", 10)
        number = self.published(index, ids)
        for limit in (1, B - 1, B, B + 1, len(ids) - 1, len(ids), len(ids) + 5):
            match = index.match(query(ids), limit, LEASE_S)
            assert spans(match) == [(number, 0, min(limit, len(ids)))]

    def test_extents_that_meet_inside_a_block_are_read_one_after_the_other(self, index: Index) -> None:
        """A child starts where its parent's tail ended: one block spans several extents."""
        ids = sequence("ABC", 20)
        first = self.published(index, ids, 0, 300)
        second = self.published(index, ids, 300, 700, parent=first)
        third = self.published(index, ids, 700, len(ids), parent=second)
        match = index.match(query(ids, 300, 700), len(ids), LEASE_S)
        assert spans(match) == [(first, 0, 300), (second, 300, 700), (third, 700, len(ids))]
        assert set(match.receipt.extent_ids) == {first, second, third}

    def test_coverage_ends_at_a_gap(self, index: Index) -> None:
        """What lies behind tokens that are not there cannot be read."""
        ids = sequence("ABC")
        first = self.published(index, ids, 0, B)
        self.published(index, ids, 2 * B, 3 * B)
        assert spans(index.match(query(ids), len(ids), LEASE_S)) == [(first, 0, B)]

    def test_an_extent_without_its_front_is_a_miss(self, index: Index) -> None:
        """Position 0 must be covered first."""
        ids = sequence("AB")
        self.published(index, ids, B, 2 * B)
        match = index.match(query(ids), len(ids), LEASE_S)
        assert (match.stop, match.receipt.extent_ids) == (0, ())

    def test_few_long_extents_win_over_many_short_ones(self, index: Index) -> None:
        """Greedy interval cover."""
        ids = sequence("ABCD")
        self.published(index, ids, 0, B)
        self.published(index, ids, B, 2 * B)
        long = self.published(index, ids, 0, 3 * B)
        rest = self.published(index, ids, 2 * B, 4 * B)
        assert spans(index.match(query(ids), len(ids), LEASE_S)) == [(long, 0, 3 * B), (rest, 3 * B, 4 * B)]

    def test_a_canonical_reader_gets_whole_canonical_blocks_only(self, index: Index) -> None:
        """Decoded KV is right but its bits are not a function of the token ids alone."""
        ids = sequence("ABC", 30)
        number = self.published(index, ids, canonical_stop=2 * B)
        decoded = self.published(index, ids, 2 * B, len(ids))
        match = index.match(query(ids, canonical=True), len(ids), LEASE_S)
        assert spans(match) == [(number, 0, 2 * B)]
        assert index.match(query(ids), len(ids), LEASE_S).stop == len(ids)
        assert decoded not in match.receipt.extent_ids

    def test_a_hash_collision_is_a_miss(self, index: Index) -> None:
        """Stored token ids are compared after every hit: a collision must never serve wrong KV."""
        ids, other = sequence("AB", 5), sequence("AX", 5)
        lying = replace(record(index, other), hashes=block_hashes(NAMESPACE, ids), end_id=record(index, ids).end_id)
        self.put(index, lying)
        match = index.match(query(ids), len(ids), LEASE_S)
        assert (match.parts, match.stop) == ((), 0)

    def test_namespaces_never_meet(self, index: Index) -> None:
        """I6: equal tokens of another model, dtype or tenant are other tokens."""
        ids = sequence("AB", 5)
        self.published(index, ids, namespace="b" * 64)
        assert index.match(query(ids), len(ids), LEASE_S).stop == 0
        assert index.match(query(ids, namespace="b" * 64), len(ids), LEASE_S).stop == len(ids)

    def test_a_hundred_and_fifty_blocks_are_covered_span_by_span(self, index: Index) -> None:
        """LMCache#2206: long chains, every extent cut at an odd place."""
        ids = tuple(range(150 * B + 17))
        borders = [0, *range(700, len(ids), 700), len(ids)]
        parent = None
        for start, stop in itertools.pairwise(borders):
            parent = self.published(index, ids, start, stop, parent=parent)
        match = index.match(query(ids, *borders), len(ids), LEASE_S)
        assert match.stop == len(ids)
        assert [(start, stop) for _, start, stop in spans(match)] == list(itertools.pairwise(borders))

    # ------------------------------------------------------------------ publishing

    def test_a_writer_holds_a_lease_on_what_it_published(self, index: Index) -> None:
        """Nothing may take it away between publishing and reading."""
        kept, receipt = self.put(index, record(index, sequence("A")))
        assert receipt.extent_ids == (kept.extent_id,)
        assert index.candidates(OWNER) == []
        assert index.remove(kept.extent_id, OWNER) is None
        assert index.release(receipt)
        assert [c.extent_id for c in index.candidates(OWNER)] == [kept.extent_id]

    def test_two_writers_of_one_key_leave_one_copy(self, index: Index) -> None:
        """I8: the second gets the first one's record back and frees its own bytes."""
        ids = sequence("A", 3)
        first, _ = self.put(index, record(index, ids))
        second = record(index, ids)
        kept, receipt = self.put(index, second)
        assert kept == first
        assert kept.place != second.place
        assert receipt.extent_ids == (first.extent_id,)
        assert index.records() == [first]
        assert index.check() == []

    def test_canonical_and_decoded_kv_of_the_same_tokens_are_two_extents(self, index: Index) -> None:
        """Their bits differ; each is kept for its readers."""
        ids = sequence("A")
        a, b = self.published(index, ids), self.published(index, ids, canonical_stop=B)
        assert a != b
        assert spans(index.match(query(ids, canonical=True), B, LEASE_S)) == [(b, 0, B)]

    def test_ids_are_never_given_twice(self, index: Index) -> None:
        """Not even after an extent was removed."""
        first = self.published(index, sequence("A"))
        index.remove(first, OWNER)
        assert self.published(index, sequence("A")) != first
        assert len({index.next_extent_id() for _ in range(20)}) == 20

    # ------------------------------------------------------------------ removal

    def test_a_parent_outlives_its_children(self, index: Index) -> None:
        """I3, leaf first: what others build on is no candidate and cannot be removed."""
        ids = sequence("ABC")
        root = self.published(index, ids, 0, B)
        middle = self.published(index, ids, B, 2 * B, parent=root)
        leaf = self.published(index, ids, 2 * B, 3 * B, parent=middle)
        for number, next_leaf in ((leaf, middle), (middle, root)):
            assert [c.extent_id for c in index.candidates(OWNER)] == [number]
            assert index.remove(next_leaf, OWNER) is None
            removed = index.remove(number, OWNER)
            assert removed is not None
            assert removed.extent_id == number
            assert index.check() == []
        assert index.remove(root, OWNER) is not None
        assert index.records() == []

    def test_a_leased_extent_is_not_evictable(self, index: Index) -> None:
        """I3: as long as one of its readers is left."""
        ids = sequence("A")
        number = self.published(index, ids)
        one, two = (index.match(query(ids), B, LEASE_S).receipt for _ in range(2))
        index.release(one)
        assert index.candidates(OWNER) == []
        assert index.remove(number, OWNER) is None
        index.release(two)
        assert index.remove(number, OWNER) is not None

    def test_what_was_removed_is_a_miss(self, index: Index) -> None:
        """And its key is free for the next writer."""
        ids = sequence("AB", 5)
        number = self.published(index, ids)
        assert index.remove(number, OWNER) is not None
        assert index.remove(number, OWNER) is None
        assert index.remove(number + 1000, OWNER) is None
        assert index.match(query(ids), len(ids), LEASE_S).stop == 0
        again = self.published(index, ids)
        assert spans(index.match(query(ids), len(ids), LEASE_S)) == [(again, 0, len(ids))]

    def test_a_child_of_a_parent_that_is_gone_is_kept(self, index: Index) -> None:
        """It is whole, and of use again as soon as the parent is rebuilt."""
        ids = sequence("AB")
        root = self.published(index, ids, 0, B)
        index.remove(root, OWNER)
        child = self.published(index, ids, B, 2 * B, parent=root)
        assert index.check() == []
        assert index.match(query(ids), 2 * B, LEASE_S).stop == 0
        rebuilt = self.published(index, ids, 0, B)
        assert spans(index.match(query(ids), 2 * B, LEASE_S)) == [(rebuilt, 0, B), (child, B, 2 * B)]

    def test_candidates_are_told_in_order_of_use(self, index: Index) -> None:
        """Reading makes recent: policies see it."""
        a, b = self.published(index, sequence("A")), self.published(index, sequence("B"))
        index.release(index.match(query(sequence("A")), B, LEASE_S).receipt)
        used = {c.extent_id: c.last_used for c in index.candidates(OWNER)}
        assert used[b] < used[a]
        assert all(c.num_tokens == B and c.num_bytes == 64 for c in index.candidates(OWNER))

    # ------------------------------------------------------------------ leases

    def test_a_lease_lasts_until_its_deadline(self, index: Index, clock: ManualClock) -> None:
        """I7, I9: before it nothing is lost, after it the lease is counted and its extents are free."""
        ids = sequence("A")
        number = self.published(index, ids)
        receipt = index.match(query(ids), B, LEASE_S).receipt
        assert receipt.deadline_s == clock() + LEASE_S
        clock.advance(LEASE_S - 1)
        assert index.sweep().num_leases == 0
        assert index.num_leases() == 1
        clock.advance(1)
        assert index.sweep().num_leases == 1
        assert index.sweep().num_leases == 0
        assert index.num_leases() == 0
        assert [c.extent_id for c in index.candidates(OWNER)] == [number]
        assert not index.release(receipt)

    def test_a_renewed_lease_lasts_longer(self, index: Index, clock: ManualClock) -> None:
        """As long as its reader lives."""
        ids = sequence("A")
        self.published(index, ids)
        receipt = index.match(query(ids), B, LEASE_S).receipt
        for _ in range(3):
            clock.advance(LEASE_S - 1)
            receipt = index.renew(receipt, LEASE_S)
            assert receipt.deadline_s == clock() + LEASE_S
            assert index.sweep().num_leases == 0
        clock.advance(LEASE_S)
        assert index.sweep().num_leases == 1

    def test_a_lease_that_is_gone_cannot_be_renewed(self, index: Index, clock: ManualClock) -> None:
        """I7: swept, released or made up, it grants nothing."""
        ids = sequence("A")
        number = self.published(index, ids)
        swept = index.match(query(ids), B, LEASE_S).receipt
        clock.advance(LEASE_S)
        index.sweep()
        released = index.match(query(ids), B, LEASE_S).receipt
        index.release(released)
        for receipt in (swept, released, Receipt("f" * 32, (number,), clock() + LEASE_S)):
            with pytest.raises(LeaseExpired):
                index.renew(receipt, LEASE_S)
        assert index.num_leases() == 0
        assert [c.extent_id for c in index.candidates(OWNER)] == [number]

    def test_a_duplicate_receipt_frees_nothing_of_others(self, index: Index) -> None:
        """I9: the second release of one receipt must not be the first of somebody else's."""
        ids = sequence("A")
        number = self.published(index, ids)
        mine, theirs = (index.match(query(ids), B, LEASE_S).receipt for _ in range(2))
        assert mine.lease_id != theirs.lease_id
        assert index.release(mine)
        assert not index.release(mine)
        assert index.num_leases() == 1
        assert index.remove(number, OWNER) is None

    def test_a_forged_receipt_frees_and_renews_nothing_of_others(self, index: Index, clock: ManualClock) -> None:
        """I9: what the index recorded counts, not what a receipt claims."""
        a, b = self.published(index, sequence("A")), self.published(index, sequence("B"))
        on_a = index.match(query(sequence("A")), B, LEASE_S).receipt
        on_b = index.match(query(sequence("B")), B, LEASE_S).receipt
        assert not index.release(Receipt("0" * 32, (a, b), on_a.deadline_s))
        assert index.num_leases() == 2
        # A real name with another's extents: only what belongs to the name moves.
        forged = index.renew(replace(on_a, extent_ids=(b,)), LEASE_S)
        assert index.check() == []
        assert index.remove(a, OWNER) is None
        assert index.release(replace(forged, extent_ids=(a, b)))
        assert [c.extent_id for c in index.candidates(OWNER)] == [a]
        assert index.remove(b, OWNER) is None
        assert index.release(on_b)
        assert index.check() == []

    def test_a_lost_receipt_leaks_until_its_time_and_no_longer(self, index: Index, clock: ManualClock) -> None:
        """I9: it is counted when it runs out; leases taken later stay."""
        ids = sequence("A")
        number = self.published(index, ids)
        index.match(query(ids), B, LEASE_S)
        clock.advance(LEASE_S / 2)
        later = index.match(query(ids), B, LEASE_S).receipt
        clock.advance(LEASE_S / 2)
        assert index.sweep().num_leases == 1
        assert index.remove(number, OWNER) is None
        assert index.release(later)
        assert index.remove(number, OWNER) is not None
        assert index.check() == []

    # ------------------------------------------------------------------ threads

    def test_many_threads_leave_one_copy_and_no_lease(self, index: Index) -> None:
        """Every method is atomic: eight threads publish, read and remove the same three extents."""
        failures: list[BaseException] = []
        start = threading.Barrier(8)

        def work(number: int) -> None:
            try:
                start.wait()
                for turn in range(30):
                    ids = sequence("ABC"[(number + turn) % 3])
                    kept, receipt = self.put(index, record(index, ids))
                    match = index.match(query(ids), B, LEASE_S)
                    assert spans(match) == [(kept.extent_id, 0, B)]
                    index.renew(match.receipt, LEASE_S)
                    assert index.release(match.receipt)
                    assert index.release(receipt)
                    index.remove(kept.extent_id, OWNER)
            except BaseException as error:  # reported by the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert index.num_leases() == 0
        assert len(index.records()) <= 3
        assert index.check() == []
