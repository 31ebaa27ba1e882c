"""The arena: ranges never overlap, nothing is lost, a generation is never used twice (I1, I10)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph.pool.arena import ALIGNMENT_BYTES, Allocation, Arena


def take(arena: Arena, num_bytes: int) -> Allocation:
    allocation = arena.reserve(num_bytes)
    assert allocation is not None
    return allocation


def test_a_range_is_rounded_up_to_the_alignment() -> None:
    arena = Arena(1024)
    first, second = take(arena, 1), take(arena, 65)
    assert (first.offset, first.num_bytes) == (0, 64)
    assert (second.offset, second.num_bytes) == (64, 128)
    assert arena.used_bytes == 192


def test_another_alignment_rounds_sizes_offsets_and_capacity() -> None:
    arena = Arena(5 * 4096 + 4095, alignment_bytes=4096)
    assert arena.capacity_bytes == 5 * 4096
    first, second = take(arena, 64), take(arena, 4097)
    assert (first.offset, first.num_bytes) == (0, 4096)
    assert (second.offset, second.num_bytes) == (4096, 8192)
    kept = arena.shrink(second, 1)
    assert kept.num_bytes == 4096
    assert arena.used_bytes == 8192
    assert arena.check() == []
    assert Arena(4095, alignment_bytes=4096).capacity_bytes == 0


def test_capacity_is_rounded_down() -> None:
    assert Arena(1000).capacity_bytes == 960
    assert Arena(63).capacity_bytes == 0
    assert Arena(63).reserve(1) is None


def test_what_does_not_fit_changes_nothing() -> None:
    arena = Arena(256)
    take(arena, 128)
    assert arena.reserve(129) is None
    assert (arena.used_bytes, arena.peak_bytes, arena.largest_free_bytes) == (128, 128, 128)
    assert arena.check() == []


def test_the_whole_capacity_can_be_taken_and_not_a_byte_more() -> None:
    arena = Arena(256)
    take(arena, 256)
    assert arena.largest_free_bytes == 0
    assert arena.reserve(1) is None
    assert arena.check() == []


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 0, 1)])
def test_neighbours_are_joined_in_whatever_order_they_come_back(order: tuple[int, ...]) -> None:
    arena = Arena(3 * 64)
    taken = [take(arena, 64) for _ in range(3)]
    for number in order:
        arena.free(taken[number])
        assert arena.check() == []
    assert arena.largest_free_bytes == arena.capacity_bytes


def test_a_hole_between_two_ranges_is_used_again() -> None:
    arena = Arena(3 * 64)
    _, hole, _ = (take(arena, 64) for _ in range(3))
    arena.free(hole)
    again = take(arena, 64)
    assert again.offset == hole.offset
    assert again.generation != hole.generation


def test_a_reader_can_tell_that_its_bytes_were_given_away() -> None:
    arena = Arena(64)
    old = take(arena, 64)
    assert arena.is_live(old)
    arena.free(old)
    assert not arena.is_live(old)
    new = take(arena, 64)
    assert arena.is_live(new)
    assert not arena.is_live(old)


def test_shrinking_keeps_the_front_and_the_generation() -> None:
    arena = Arena(512)
    whole = take(arena, 512)
    kept = arena.shrink(whole, 100)
    assert (kept.offset, kept.num_bytes, kept.generation) == (0, 128, whole.generation)
    assert arena.is_live(whole)
    assert arena.largest_free_bytes == 384
    assert arena.check() == []
    assert arena.shrink(kept, 128) == kept
    arena.free(kept)
    assert arena.used_bytes == 0


def test_misuse_is_an_error_and_changes_nothing() -> None:
    arena = Arena(512)
    live, gone = take(arena, 64), take(arena, 64)
    arena.free(gone)
    for call in (
        lambda: arena.free(gone),
        lambda: arena.free(replace(live, generation=99)),
        lambda: arena.free(replace(live, num_bytes=128)),
        lambda: arena.free(Allocation(64, 64, 1)),
        lambda: arena.shrink(gone, 1),
        lambda: arena.shrink(live, 65),
        lambda: arena.shrink(live, 0),
        lambda: arena.reserve(0),
        lambda: arena.reserve(-1),
    ):
        with pytest.raises(ValueError, match="live|shrink|reserve"):
            call()
    assert arena.used_bytes == 64
    assert arena.check() == []


def test_check_sees_what_is_broken() -> None:
    arena = Arena(256)
    take(arena, 64)
    arena.used_bytes += 64
    assert "do not add up" in " ".join(arena.check())
    arena.used_bytes -= 64
    arena._free = [(128, 128)]
    assert "gap" in " ".join(arena.check())
    arena._free = [(0, 256)]
    assert "overlap" in " ".join(arena.check())
    arena._free = [(64, 64), (128, 128)]
    assert "not joined" in " ".join(arena.check())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["reserve", "free", "shrink"]), st.integers(0, 700)), max_size=60),
    st.sampled_from([ALIGNMENT_BYTES, 128]),
)
def test_any_sequence_of_calls_equals_a_byte_map(calls: list[tuple[str, int]], alignment: int) -> None:
    """Oracle: one list entry per aligned unit, holding the number of its owner."""
    capacity = 2048
    arena, owners = Arena(capacity, alignment), [0] * (capacity // alignment)
    live: list[Allocation] = []
    seen: set[int] = set()
    peak = 0
    for what, number in calls:
        if what == "reserve":
            allocation = arena.reserve(number + 1)
            units = -(-(number + 1) // alignment)
            runs = "".join("x" if owner else "." for owner in owners)
            assert (allocation is not None) == ("." * units in runs)
            if allocation is not None:
                assert allocation.generation not in seen
                seen.add(allocation.generation)
                at = allocation.offset // alignment
                assert owners[at : at + units] == [0] * units
                owners[at : at + units] = [allocation.generation] * units
                live.append(allocation)
        elif live:
            allocation = live.pop(number % len(live))
            at, units = allocation.offset // alignment, allocation.num_bytes // alignment
            if what == "free":
                arena.free(allocation)
                owners[at : at + units] = [0] * units
                assert not arena.is_live(allocation)
            else:
                kept = arena.shrink(allocation, number % allocation.num_bytes + 1)
                keep = kept.num_bytes // alignment
                owners[at + keep : at + units] = [0] * (units - keep)
                live.append(kept)
        used = sum(1 for owner in owners if owner) * alignment
        peak = max(peak, used)
        assert (arena.used_bytes, arena.peak_bytes) == (used, peak)
        assert arena.check() == []
        assert all(arena.is_live(allocation) for allocation in live)
