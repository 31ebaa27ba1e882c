"""Least recently used: a pure function from candidates to victims."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.evict.base import Candidate
from aaflow_langgraph.evict.lru import least_recently_used

candidates = st.lists(
    st.builds(Candidate, st.integers(1, 99), st.integers(1, 9), st.just(1), st.integers(1, 99)),
    unique_by=(lambda c: c.extent_id, lambda c: c.last_used),
    max_size=12,
)


def test_the_longest_unused_go_first_until_enough_is_free() -> None:
    a, b, c = Candidate(1, 100, 1, 30), Candidate(2, 100, 1, 10), Candidate(3, 100, 1, 20)
    assert least_recently_used([a, b, c], 1) == [b]
    assert least_recently_used([a, b, c], 100) == [b]
    assert least_recently_used([a, b, c], 101) == [b, c]
    assert least_recently_used([a, b, c], 10_000) == [b, c, a]


def test_nobody_goes_when_nothing_is_needed_or_nobody_is_there() -> None:
    assert least_recently_used([Candidate(1, 100, 1, 1)], 0) == []
    assert least_recently_used([], 100) == []


def test_a_tie_goes_to_the_older_extent() -> None:
    a, b = Candidate(2, 64, 1, 5), Candidate(1, 64, 1, 5)
    assert least_recently_used([a, b], 1) == [b]


@given(candidates, st.integers(0, 120))
def test_victims_are_just_enough_and_the_oldest(found: list[Candidate], need: int) -> None:
    before = list(found)
    victims = least_recently_used(found, need)
    assert found == before  # the argument is not changed
    spared = [c for c in found if c not in victims]
    assert all(v.last_used < s.last_used for v in victims for s in spared)
    freed = sum(v.num_bytes for v in victims)
    assert freed >= need or not spared
    assert not victims or freed - victims[-1].num_bytes < need
    assert least_recently_used(list(reversed(found)), need) == victims
