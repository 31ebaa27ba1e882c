"""The part of an index's contract that is about owners, tiers, claims and recipes. See ``index_contract.py``."""

from __future__ import annotations

import threading

import pytest

from aaflow_langgraph.errors import Fenced, LeaseExpired
from aaflow_langgraph.index.base import ExtentRecord, Index, Place
from aaflow_langgraph.model import Receipt, Recipe, Span, Turn
from aaflow_langgraph.testing.clock import ManualClock
from aaflow_langgraph.testing.index_cases import LEASE_S, OTHER, OWNER, OWNER_LEASE_S, B, query, record, sequence, spans


def recipe(kv_id: str = "c" * 64, *, role: str = "") -> Recipe:
    """A recipe of three tokens."""
    return Recipe(kv_id, "a" * 64, "d" * 64, 300, (1, 2, 3), 1, (Turn(role, Span(300, 303), False),), "append")


class TiersContract:
    """Who owns which bytes, at which tier, and what happens when they go."""

    epoch: int

    def put(self, index: Index, made: ExtentRecord) -> tuple[ExtentRecord, Receipt]:
        """Publish in the name of the first owner."""
        return index.put(made, self.epoch, LEASE_S)

    def put_free(self, index: Index, made: ExtentRecord, epoch: int | None = None) -> ExtentRecord:
        """Publish and give the writer's lease back."""
        kept, receipt = index.put(made, self.epoch if epoch is None else epoch, LEASE_S)
        assert index.release(receipt)
        return kept

    # ------------------------------------------------------------------ owners

    def test_who_has_not_joined_publishes_nothing(self, index: Index) -> None:
        """C5: fenced by the epoch, not by trust."""
        made = record(index, sequence("A"), owner=OTHER)
        with pytest.raises(Fenced):
            index.put(made, self.epoch, LEASE_S)
        with pytest.raises(Fenced):
            index.put(record(index, sequence("A")), self.epoch + 1, LEASE_S)
        assert index.records() == []
        assert index.num_leases() == 0

    def test_an_owner_back_from_a_lost_lease_is_fenced(self, index: Index, clock: ManualClock) -> None:
        """C5: what it says under its old epoch is refused, until it joins again and announces what it holds."""
        epoch = index.join(OTHER, LEASE_S)
        ids = sequence("A")
        kept = self.put_free(index, record(index, ids, owner=OTHER), epoch)
        assert index.heartbeat(OTHER, epoch, LEASE_S)
        clock.advance(LEASE_S)
        swept = index.sweep()
        assert (swept.num_owners, swept.num_extents) == (1, 1)
        assert index.match(query(ids), B, LEASE_S).stop == 0
        assert not index.heartbeat(OTHER, epoch, LEASE_S)
        with pytest.raises(Fenced):
            index.put(kept, epoch, LEASE_S)
        again = index.join(OTHER, LEASE_S)
        assert again > epoch
        self.put_free(index, kept, again)
        assert spans(index.match(query(ids), B, LEASE_S)) == [(kept.extent_id, 0, B)]

    def test_an_owner_past_its_time_is_fenced_before_it_is_swept(self, index: Index, clock: ManualClock) -> None:
        """The deadline decides, not who came first."""
        epoch = index.join(OTHER, LEASE_S)
        clock.advance(LEASE_S)
        assert index.owners()[OTHER] <= 0
        assert not index.heartbeat(OTHER, epoch, LEASE_S)
        with pytest.raises(Fenced):
            index.put(record(index, sequence("A"), owner=OTHER), epoch, LEASE_S)

    def test_leaving_takes_an_owners_places_and_nobody_elses(self, index: Index) -> None:
        """Leased or not: the bytes go with their owner. What is on disk too stays."""
        epoch = index.join(OTHER, OWNER_LEASE_S)
        mine = self.put_free(index, record(index, sequence("A")))
        theirs = self.put_free(index, record(index, sequence("B"), owner=OTHER), epoch)
        on_disk = self.put_free(index, record(index, sequence("C"), owner=OTHER), epoch)
        assert index.set_on_disk(on_disk.extent_id, True)
        receipt = index.match(query(sequence("B")), B, LEASE_S).receipt
        assert set(index.owners()) == {OWNER, OTHER}
        assert {r.extent_id for r in index.records(OTHER)} == {theirs.extent_id, on_disk.extent_id}
        assert index.leave(OTHER) == 2
        assert index.leave(OTHER) == 0
        assert set(index.owners()) == {OWNER}
        with pytest.raises(LeaseExpired):
            index.renew(receipt, LEASE_S)
        assert index.num_leases() == 0
        left = {r.extent_id: (r.place is not None, r.on_disk) for r in index.records()}
        assert left == {mine.extent_id: (True, False), on_disk.extent_id: (False, True)}
        assert index.check() == []

    def test_joining_again_drops_what_was_announced_before(self, index: Index) -> None:
        """A new epoch starts from what the owner announces under it."""
        self.put_free(index, record(index, sequence("A")))
        assert index.join(OWNER, OWNER_LEASE_S) > self.epoch
        assert index.records() == []

    def test_only_the_owner_evicts(self, index: Index) -> None:
        """Another's pool is not ours to give away."""
        kept = self.put_free(index, record(index, sequence("A")))
        assert index.candidates(OTHER) == []
        assert index.remove(kept.extent_id, OTHER) is None
        assert index.remove(kept.extent_id, OWNER) == kept

    def test_children_in_another_pool_do_not_pin_a_parent(self, index: Index) -> None:
        """Each pool evicts leaf first by itself; what is unreachable meanwhile is reachable after a rebuild."""
        epoch = index.join(OTHER, OWNER_LEASE_S)
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B))
        child = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id, owner=OTHER), epoch)
        assert child.parent is None
        assert index.match(query(ids), 2 * B, LEASE_S).stop == 2 * B
        index.sweep()
        for receipt in [index.match(query(ids), 2 * B, LEASE_S).receipt]:
            index.release(receipt)
        assert index.check() == []

    # ------------------------------------------------------------------ tiers

    def test_an_extent_on_disk_is_found_without_a_place(self, index: Index) -> None:
        """Its reader fetches it."""
        ids = sequence("AB", 5)
        found = self.put_free(index, record(index, ids, owner=None))
        match = index.match(query(ids), len(ids), LEASE_S)
        assert spans(match) == [(found.extent_id, 0, len(ids))]
        assert match.parts[0][0].place is None
        assert match.parts[0][0].on_disk
        assert index.candidates(OWNER) == []

    def test_evicting_what_is_on_disk_keeps_it_known_and_needs_no_leaf(self, index: Index) -> None:
        """Spilled: a copy on disk frees the place even under children."""
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B))
        child = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id))
        assert index.remove(root.extent_id, OWNER) is None
        assert index.set_on_disk(root.extent_id, True)
        assert {c.extent_id for c in index.candidates(OWNER)} == {root.extent_id, child.extent_id}
        removed = index.remove(root.extent_id, OWNER)
        assert removed is not None
        assert removed.place == root.place
        assert index.match(query(ids), 2 * B, LEASE_S).stop == 2 * B
        assert index.check() == []

    def test_a_child_that_is_on_disk_only_does_not_pin_its_parent(self, index: Index) -> None:
        """Bonds order eviction inside one pool; else what cannot be written to disk would stay for good."""
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B))
        child = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id))
        assert index.set_on_disk(child.extent_id, True)
        assert index.remove(root.extent_id, OWNER) is None
        assert index.remove(child.extent_id, OWNER) is not None
        assert index.check() == []
        assert [c.extent_id for c in index.candidates(OWNER)] == [root.extent_id]
        assert index.remove(root.extent_id, OWNER) is not None
        assert [(r.extent_id, r.parent) for r in index.records()] == [(child.extent_id, None)]
        assert index.check() == []

    def test_a_fetch_gives_an_extent_a_place_once(self, index: Index) -> None:
        """Two that fetch the same extent: the second frees its copy."""
        ids = sequence("A")
        found = self.put_free(index, record(index, ids, owner=None))
        one, two = (record(index, ids).place for _ in range(2))
        assert one is not None
        assert two is not None
        assert index.move(found.extent_id, None, one, self.epoch)
        assert not index.move(found.extent_id, None, two, self.epoch)
        assert [r.place for r in index.records(OWNER)] == [one]
        with pytest.raises(Fenced):
            index.move(found.extent_id, one, two, self.epoch + 1)
        assert not index.move(found.extent_id + 10**6, None, two, self.epoch)

    def test_what_a_dead_owner_left_can_be_adopted(self, index: Index) -> None:
        """A reader that copied it into its own pool says so; the bonds inside the old pool end."""
        epoch = index.join(OTHER, OWNER_LEASE_S)
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B, owner=OTHER), epoch)
        child = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id, owner=OTHER), epoch)
        assert child.parent == root.extent_id
        new = record(index, ids).place
        assert new is not None
        assert index.move(root.extent_id, root.place, new, self.epoch)
        assert index.leave(OTHER) == 1
        assert [(r.extent_id, r.place) for r in index.records()] == [(root.extent_id, new)]
        assert [c.extent_id for c in index.candidates(OWNER)] == [root.extent_id]
        assert index.check() == []

    def test_lost_bytes_are_forgotten_even_under_a_lease(self, index: Index) -> None:
        """The lease could not protect them; its holder finds out when it renews."""
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B))
        self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id))
        receipt = index.match(query(ids), 2 * B, LEASE_S).receipt
        elsewhere = record(index, ids).place
        assert root.place is not None
        assert elsewhere is not None
        assert not index.lose(root.extent_id, elsewhere)
        assert index.renew(receipt, LEASE_S).extent_ids == receipt.extent_ids
        assert index.lose(root.extent_id, root.place)
        assert not index.lose(root.extent_id, root.place)
        with pytest.raises(LeaseExpired):
            index.renew(receipt, LEASE_S)
        assert index.match(query(ids), 2 * B, LEASE_S).stop == 0
        assert index.check() == []

    def test_an_extent_that_is_nowhere_is_forgotten(self, index: Index) -> None:
        """Disk was the last place."""
        ids = sequence("A")
        kept = self.put_free(index, record(index, ids))
        assert index.set_on_disk(kept.extent_id, True)
        assert index.remove(kept.extent_id, OWNER) is not None
        assert [r.place for r in index.records()] == [None]
        assert index.set_on_disk(kept.extent_id, False)
        assert not index.set_on_disk(kept.extent_id, True)
        assert index.records() == []
        assert index.check() == []

    def test_a_writer_of_what_is_on_disk_gives_it_a_place(self, index: Index) -> None:
        """I8: one record, both tiers."""
        ids = sequence("A")
        found = self.put_free(index, record(index, ids, owner=None))
        made = record(index, ids)
        kept, receipt = self.put(index, made)
        assert (kept.extent_id, kept.place, kept.on_disk) == (found.extent_id, made.place, True)
        assert index.release(receipt)
        announced = self.put_free(index, record(index, ids, owner=None))
        assert announced == kept
        assert len(index.records()) == 1

    # ------------------------------------------------------------------ merged extents

    def test_a_merged_extent_is_found_at_every_end_that_it_had(self, index: Index) -> None:
        """Bytes moved; where recipes end did not. Ends that lie at a block's border are found by the block."""
        ids = sequence("ABC", 60)
        borders = (30, 300, 310, 2 * B, 700)
        kept = self.put_free(index, record(index, ids, borders=borders))
        assert kept.borders == record(index, ids, borders=borders).borders
        for end in (*borders, len(ids)):
            match = index.match(query(ids[:end]), end, LEASE_S)
            assert spans(match) == [(kept.extent_id, 0, end)]
            assert match.parts[0][0].borders == kept.borders
            assert [found.extent_id for found in index.covering(query(ids[:end]))] == [kept.extent_id]
        for other, stop in (
            (ids[:300] + sequence("X"), 300),  # leaves it at a border
            (ids[:305] + sequence("X"), 300),
            (ids[: B + 10], B),  # ends at none
            (ids[: 2 * B] + sequence("X"), 2 * B),
            (ids[:29], 0),
        ):
            known = [end for end in (30, 300, 310) if end <= len(other)]
            assert index.match(query(other, *known), len(other), LEASE_S).stop == stop
        assert index.match(query(ids[:310]), 305, LEASE_S).stop == 305
        assert index.match(query(ids, canonical=True), len(ids), LEASE_S).stop == 0
        assert index.check() == []

    def test_the_last_of_the_borders_that_a_reader_knows_counts(self, index: Index) -> None:
        """A longer one wins over a shorter one, and over the blocks in front of it."""
        ids = sequence("AB")
        kept = self.put_free(index, record(index, ids, 10, 500, borders=(100, 300, 400)))
        front = self.put_free(index, record(index, ids, 0, 10))
        for known, stop in (((10, 100), 100), ((10, 100, 300), 300), ((10, 300, 400), 400), ((10, 100, 300, 500), 500)):
            match = index.match(query(ids, *known), len(ids), LEASE_S)
            assert spans(match) == [(front.extent_id, 0, 10), (kept.extent_id, 10, max(stop, B))]

    def test_a_merged_extent_wins_over_its_parts_wherever_a_reader_ends(self, index: Index) -> None:
        """Also at the end of its first part, and where a limit cuts both: its parts fall into disuse."""
        ids = sequence("AB", 8)
        first = self.put_free(index, record(index, ids, 0, 40))
        self.put_free(index, record(index, ids, 40, len(ids), parent=first.extent_id))
        merged = self.put_free(index, record(index, ids, borders=(40,)))
        for end in (40, len(ids)):
            for limit in (20, end):
                match = index.match(query(ids[:end], 40), limit, LEASE_S)
                assert spans(match) == [(merged.extent_id, 0, limit)]

    def test_extents_with_other_borders_are_other_extents(self, index: Index) -> None:
        """I8 holds among those that the same names lead to: no name is lost because a twin without it was there first."""
        ids = sequence("A", 40)
        plain, one, other = (self.put_free(index, record(index, ids, borders=b)) for b in ((), (30,), (30, 270)))
        assert len({made.extent_id for made in (plain, one, other)}) == 3
        again = self.put_free(index, record(index, ids, borders=(30, 270)))
        assert again == other
        assert index.remove(one.extent_id, OWNER) is not None
        assert [found.extent_id for found in index.covering(query(ids[:30]))] == [other.extent_id]
        assert index.remove(other.extent_id, OWNER) is not None
        assert index.covering(query(ids[:30])) == []
        assert index.check() == []

    def test_what_was_built_on_the_parts_is_built_on_what_they_were_merged_into(self, index: Index) -> None:
        """I2, I3: the parts can go, the merged extent cannot before its children; its parent is pinned by it."""
        ids, fork = sequence("ABC"), (*sequence("A"), *sequence("X"))
        root = self.put_free(index, record(index, ids, 0, 40))
        parts = [root]
        for start, stop in ((40, B), (B, 300), (300, 2 * B)):
            parts.append(self.put_free(index, record(index, ids, start, stop, parent=parts[-1].extent_id)))
        leaf = self.put_free(index, record(index, ids, 2 * B, 3 * B, parent=parts[-1].extent_id))
        branch = self.put_free(index, record(index, fork, B, 2 * B, parent=parts[1].extent_id))
        merged = self.put_free(index, record(index, ids, 40, 2 * B, borders=(B, 300), parent=root.extent_id))
        inner = [part.extent_id for part in parts[1:]]
        assert all(index.remove(number, OWNER) is None for number in inner)
        for _ in range(2):  # idempotent
            assert index.take_over(merged.extent_id, inner)
            assert index.check() == []
        parents = {found.extent_id: found.parent for found in index.records()}
        assert parents == {
            root.extent_id: None,
            merged.extent_id: root.extent_id,
            leaf.extent_id: merged.extent_id,
            branch.extent_id: merged.extent_id,
            **dict.fromkeys(inner),
        }
        assert all(index.remove(number, OWNER) is not None for number in inner)
        for asked, stop in ((query(ids, 40), 3 * B), (query(fork, 40), 2 * B)):
            match = index.match(asked, stop, LEASE_S)
            assert match.stop == stop
            assert index.release(match.receipt)
        for number, below in (
            (leaf.extent_id, merged.extent_id),
            (branch.extent_id, merged.extent_id),
            (merged.extent_id, root.extent_id),
        ):
            assert index.remove(below, OWNER) is None
            assert index.remove(number, OWNER) is not None
        assert index.remove(root.extent_id, OWNER) is not None
        assert not index.take_over(merged.extent_id, [root.extent_id])
        assert index.records() == []
        assert index.check() == []

    def test_parts_keep_their_readers_until_the_last_one_leaves(self, index: Index) -> None:
        """I3: whoever reads in place goes on undisturbed."""
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, 40))
        leaf = self.put_free(index, record(index, ids, 40, 2 * B, parent=root.extent_id))
        reading = index.match(query(ids, 40), 2 * B, LEASE_S).receipt
        merged = self.put_free(index, record(index, ids, borders=(40,)))
        assert index.take_over(merged.extent_id, [root.extent_id, leaf.extent_id])
        assert index.remove(root.extent_id, OWNER) is None
        assert index.renew(reading, LEASE_S).extent_ids == reading.extent_ids
        assert index.release(reading)
        assert index.remove(root.extent_id, OWNER) is not None
        assert index.remove(leaf.extent_id, OWNER) is not None
        assert [found.extent_id for found in index.records()] == [merged.extent_id]
        assert index.check() == []

    def test_children_in_another_pool_are_no_children_of_the_merged_extent(self, index: Index) -> None:
        """Bonds order eviction inside one pool."""
        epoch = index.join(OTHER, OWNER_LEASE_S)
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B, owner=OTHER), epoch)
        leaf = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id, owner=OTHER), epoch)
        merged = self.put_free(index, record(index, ids, 0, 300, borders=(B,)))
        assert index.take_over(merged.extent_id, [root.extent_id])
        assert {found.extent_id: found.parent for found in index.records()}[leaf.extent_id] is None
        assert index.remove(merged.extent_id, OWNER) is not None
        assert index.check() == []

    def test_uses_of_the_parts_count_for_the_merged_extent(self, index: Index) -> None:
        """A policy that counts must not take for new what was used all along."""
        ids = sequence("AB")
        root = self.put_free(index, record(index, ids, 0, B))
        leaf = self.put_free(index, record(index, ids, B, 2 * B, parent=root.extent_id))
        for _ in range(3):
            index.release(index.match(query(ids), 2 * B, LEASE_S).receipt)
        before = {c.extent_id: c for c in index.candidates(OWNER)}[leaf.extent_id]
        merged = self.put_free(index, record(index, ids, borders=(B,)))
        assert index.take_over(merged.extent_id, [root.extent_id, leaf.extent_id])
        after = {c.extent_id: c for c in index.candidates(OWNER)}[merged.extent_id]
        assert after.num_uses == before.num_uses == 4
        assert after.created < before.created < before.last_used < after.last_used

    # ------------------------------------------------------------------ what policies see

    def test_candidates_tell_how_often_and_where(self, index: Index) -> None:
        """Frequency, age and position, for the policies that look at them."""
        ids = sequence("AB")
        kept = self.put_free(index, record(index, ids, B, 2 * B))
        younger = self.put_free(index, record(index, ids, 0, B))
        for _ in range(3):
            index.release(index.match(query(ids), B, LEASE_S).receipt)
        seen = {c.extent_id: c for c in index.candidates(OWNER)}
        assert seen[younger.extent_id].num_uses == 4
        assert seen[kept.extent_id].num_uses == 1
        assert (seen[kept.extent_id].start, seen[kept.extent_id].num_tokens) == (B, B)
        assert seen[kept.extent_id].created < seen[younger.extent_id].created < seen[younger.extent_id].last_used

    # ------------------------------------------------------------------ claims

    def test_one_of_many_gets_a_claim(self, index: Index) -> None:
        """Two workers that need the same prefix compute it once."""
        got: list[str] = []
        start = threading.Barrier(8)

        def work(holder: str) -> None:
            start.wait()
            if index.claim("f" * 64, holder, LEASE_S):
                got.append(holder)

        threads = [threading.Thread(target=work, args=(f"{n}" * 32,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(got) == 1
        assert not index.unclaim("f" * 64, "9" * 32)
        assert index.unclaim("f" * 64, got[0])
        assert not index.unclaim("f" * 64, got[0])
        assert index.claim("f" * 64, "9" * 32, LEASE_S)

    def test_a_claim_lasts_until_its_deadline_and_can_be_renewed(self, index: Index, clock: ManualClock) -> None:
        """A holder that died keeps nobody waiting for good."""
        assert index.claim("f" * 64, OWNER, LEASE_S)
        clock.advance(LEASE_S / 2)
        assert index.claim("f" * 64, OWNER, LEASE_S)
        clock.advance(LEASE_S / 2)
        assert not index.claim("f" * 64, OTHER, LEASE_S)
        clock.advance(LEASE_S / 2)
        assert index.claim("f" * 64, OTHER, LEASE_S)
        assert not index.claim("f" * 64, OWNER, LEASE_S)

    # ------------------------------------------------------------------ recipes

    def test_a_recipe_is_shared_until_it_was_long_unused(self, index: Index, clock: ManualClock) -> None:
        """Reading keeps it; a recipe that nobody reads ends."""
        assert index.recipe("c" * 64) is None
        index.put_recipe(recipe(), LEASE_S)
        clock.advance(LEASE_S / 2)
        assert index.recipe("c" * 64) == recipe()
        clock.advance(LEASE_S / 2)
        index.sweep()
        assert index.recipe("c" * 64) == recipe()
        clock.advance(LEASE_S)
        assert index.recipe("c" * 64) is None
        index.sweep()
        assert index.recipe("c" * 64) is None

    def test_chat_structure_is_worth_more_than_none(self, index: Index) -> None:
        """The same tokens may be reached by several routes."""
        index.put_recipe(recipe(), LEASE_S)
        index.put_recipe(recipe(role="user"), LEASE_S)
        index.put_recipe(recipe(), LEASE_S)
        assert index.recipe("c" * 64) == recipe(role="user")

    # ------------------------------------------------------------------ many at once

    def test_owners_that_come_and_go_leave_nothing_behind(self, index: Index) -> None:
        """Eight threads join, publish, read, move, lose and leave."""
        failures: list[BaseException] = []
        start = threading.Barrier(8)

        def work(number: int) -> None:
            try:
                owner = f"{number}" * 31 + "f"
                start.wait()
                for turn in range(15):
                    epoch = index.join(owner, OWNER_LEASE_S)
                    ids = sequence("ABC"[(number + turn) % 3])
                    made = record(index, ids, owner=owner)
                    kept, receipt = index.put(made, epoch, LEASE_S)
                    match = index.match(query(ids), B, LEASE_S)
                    assert match.stop in (0, B)  # whoever published it may have left meanwhile
                    index.release(match.receipt)
                    index.release(receipt)
                    if isinstance(kept.place, Place) and kept.place.owner == owner:
                        index.lose(kept.extent_id, kept.place)
                    index.leave(owner)
            except BaseException as error:  # reported by the main thread
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert index.records() == []
        assert index.num_leases() == 0
        assert set(index.owners()) == {OWNER}
        assert index.check() == []
