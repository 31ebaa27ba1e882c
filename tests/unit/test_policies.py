"""Each policy's own order, and what all of them promise: distinct victims, enough or all, one answer for one set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.evict.base import TIES, Candidate, Policy
from aaflow_langgraph.evict.cost import recompute_cost
from aaflow_langgraph.evict.fifo import first_in_first_out
from aaflow_langgraph.evict.gdsf import greedy_dual_size_frequency
from aaflow_langgraph.evict.guarded import Guarded
from aaflow_langgraph.evict.lfu import least_frequently_used
from aaflow_langgraph.evict.policies import POLICIES, policy
from aaflow_langgraph.evict.value import by_value

ALL = 1 << 40


def extent(
    number: int, *, size: int = 100, tokens: int = 1, last: int = 1, uses: int = 1, created: int = 1, start: int = 0
) -> Candidate:
    return Candidate(number, size, tokens, last, uses, created, start)


def numbers(victims: list[Candidate]) -> list[int]:
    return [victim.extent_id for victim in victims]


def test_lfu_evicts_the_least_used_and_among_them_the_longest_unused() -> None:
    found = [extent(1, uses=3, last=1), extent(2, uses=1, last=9), extent(3, uses=1, last=5), extent(4, uses=2, last=2)]
    assert numbers(least_frequently_used(found, ALL)) == [3, 2, 4, 1]
    assert numbers(least_frequently_used(found, 101)) == [3, 2]


def test_fifo_evicts_what_was_stored_first_however_much_it_is_used() -> None:
    found = [extent(1, created=3, last=3), extent(2, created=1, last=99, uses=50), extent(3, created=2, last=2)]
    assert numbers(first_in_first_out(found, ALL)) == [2, 3, 1]


def test_gdsf_evicts_what_is_cheap_to_compute_for_its_bytes() -> None:
    cheap_per_byte = extent(1, size=200, tokens=10)
    dear_by_bytes = extent(2, size=100, tokens=10)
    dear_by_position = extent(3, size=200, tokens=10, start=9000)
    dear_by_uses = extent(4, size=100, tokens=10, uses=2)
    found = [dear_by_uses, dear_by_position, dear_by_bytes, cheap_per_byte]
    assert numbers(greedy_dual_size_frequency(found, ALL)) == [1, 2, 3, 4]


def test_gdsf_lets_go_of_what_was_popular_once() -> None:
    """Worth 5, 1, 1 and 0 (in hundredths). Unused for 3, 1, 2 and 0: a step costs 7/6, and 1.5, -0.17, -1.33, 0 are left.
    The first unused for 10: a step costs 7/13, and -0.38, 0.46, -0.08, 0 are left."""
    young = [extent(2, last=9), extent(3, last=8), extent(9, last=10, size=10**9, tokens=1)]
    assert numbers(greedy_dual_size_frequency([extent(1, uses=5, last=7), *young], 101)) == [3, 2]
    assert numbers(greedy_dual_size_frequency([extent(1, uses=5, last=0), *young], 1)) == [1]


def test_by_value_evicts_what_its_function_says_is_worth_least() -> None:
    worth = {1: 0.5, 2: 0.0, 3: 7.0, 4: 0.0}
    found = [extent(1), extent(2, last=5), extent(3), extent(4, last=2)]
    assert numbers(by_value(lambda c: worth[c.extent_id])(found, ALL)) == [4, 2, 1, 3]
    assert numbers(by_value(lambda c: worth[c.extent_id], TIES["newest"])(found, ALL)) == [2, 4, 1, 3]


@pytest.mark.parametrize(("rule", "order"), [("oldest", [3, 2, 1]), ("newest", [1, 3, 2]), ("deepest", [3, 2, 1])])
def test_a_tie_rule_orders_equals(rule: str, order: list[int]) -> None:
    found = [extent(1, last=9, start=5), extent(2, last=3, start=5), extent(3, last=3, start=8)]
    assert numbers(least_frequently_used(found, ALL, TIES[rule])) == order


@pytest.mark.parametrize("rule", TIES)
def test_a_tie_rule_decides_between_extents_that_differ_in_nothing_but_their_id(rule: str) -> None:
    twins = [extent(1), extent(2)]
    first = least_frequently_used(twins, 1, TIES[rule])
    assert len(first) == 1
    assert least_frequently_used(twins[::-1], 1, TIES[rule]) == first


def test_a_later_token_costs_more_than_an_early_one() -> None:
    assert recompute_cost(0, 0) == 0
    assert recompute_cost(0, 1) == 1
    assert recompute_cost(500, 10) == pytest.approx(sum(recompute_cost(at, 1) for at in range(500, 510)))
    assert recompute_cost(501, 1) > recompute_cost(500, 1)


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    assert policy("lru") is POLICIES["lru"]
    with pytest.raises(ConfigError, match="'lur'; there are fifo, gdsf, lfu, lru"):
        policy("lur")


EVERY: list[object] = [
    pytest.param(partial(chosen, ties=ties), id=f"{name}-{rule}")
    for name, chosen in [*POLICIES.items()]
    for rule, ties in TIES.items()
] + [pytest.param(by_value(lambda c: c.num_tokens % 3), id="by_value")]
untimed = settings(deadline=None)  # how long an example takes says nothing here
candidates = st.lists(
    st.builds(
        Candidate,
        st.integers(1, 99),
        st.integers(1, 9),
        st.integers(1, 5000),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(1, 9),
        st.integers(0, 100_000),
    ),
    unique_by=lambda c: c.extent_id,
    max_size=12,
)


@pytest.mark.parametrize("chosen", EVERY)
@untimed
@given(found=candidates, need=st.integers(0, 120), shuffled=st.randoms(use_true_random=False))
def test_every_policy_takes_distinct_candidates_just_enough_or_all_whatever_their_order(
    chosen: Policy, found: list[Candidate], need: int, shuffled: object
) -> None:
    before = list(found)
    victims = chosen(found, need)
    assert found == before
    assert len(set(numbers(victims))) == len(victims)
    assert set(victims) <= set(found)
    freed = sum(v.num_bytes for v in victims)
    assert freed >= need or len(victims) == len(found)
    assert not victims or freed - victims[-1].num_bytes < need
    shuffled.shuffle(found)  # type: ignore[attr-defined]
    assert chosen(found, need) == victims


def raises(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
    raise KeyError("the user's own")


def invents(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
    return [extent(77)]


def says_nothing(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
    return None  # type: ignore[return-value]


def names_ids(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
    return [found[0].extent_id]  # type: ignore[list-item]


@pytest.mark.parametrize("broken", [raises, invents, says_nothing, names_ids])
def test_where_a_policy_fails_the_longest_unused_goes_and_it_is_said_once(
    broken: Policy, caplog: pytest.LogCaptureFixture
) -> None:
    found = [extent(1, last=3), extent(2, last=1), extent(3, last=2)]
    guarded = Guarded(broken)
    assert numbers(guarded(found, 101)) == [2, 3]
    assert numbers(guarded(found, 1)) == [2]
    (record,) = caplog.records
    assert "used least recently" in record.message
    assert record.exc_info is not None


def test_a_policy_that_fails_is_asked_again_and_one_that_works_decides(caplog: pytest.LogCaptureFixture) -> None:
    found = [extent(1, last=3), extent(2, last=1), extent(3, last=2)]
    moods = iter([True, False])

    def moody(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
        return raises(found, need_bytes) if next(moods) else [max(found, key=lambda candidate: candidate.last_used)]

    guarded = Guarded(moody)
    assert [numbers(guarded(found, 1)) for _ in range(2)] == [[2], [1]]
    assert len(caplog.records) == 1


def test_what_ends_the_program_is_no_failure_of_a_policy() -> None:
    def interrupted(found: Sequence[Candidate], need_bytes: int) -> list[Candidate]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guarded(interrupted)([extent(1)], 1)
