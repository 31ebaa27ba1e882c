"""Replay of prefix traces: by hand, against a block-by-block replay, and against the best of all possible runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph.bench.evict import run
from aaflow_langgraph.bench.replay import Replay, clairvoyant_hits, infinite_hits, policy_hits
from aaflow_langgraph.bench.traces import Trace
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.evict.base import TIES
from aaflow_langgraph.evict.policies import POLICIES

A, B, C, D, E, G, H, I = range(1, 9)  # noqa: E741
HAND = ((A, B), (C,), (A, B), (D,), (A, B), (D,), (E,), (D,), (A,), (G,), (H,), (I,), (A,), (H,), (C,))
"""Three blocks of 4,096 tokens, where a run of two from the start is worth 2 and one block 1.5 a use. What stays after
each request, with what left, and ``+n`` hits:

     request   lru         lfu         fifo        gdsf (worth less loss of those that may go)
  1  A B       AB          AB          AB          AB
  2  C         ABC         ABC         ABC         ABC
  3  A B       ABC +2      ABC +2      ABC +2      ABC +2
  4  D         ABD -C      ABD -C      ACD -B      ABD -C   AB 4, C 1.5 - 5.5
  5  A B       ABD +2      ABD +2      ABD +1 -C   ABD +2
  6  D         ABD +1      ABD +1      ABD +1      ABD +1
  7  E         ADE -B      ABE -D      ABE -D      ADE -B   AB 6 - 9, D 3
  8  D         ADE +1      ABD -E      ADE -B      ADE +1
  9  A         ADE +1      ABD +1      ADE +1      ADE +1
 10  G         ADG -E      ABG -D      DEG -A      ADG -E   A 6, D 4.5 - 4, E 1.5 - 8
 11  H         AGH -D      ABH -G      DGH -E      AGH -D   A 6 - 4, D 4.5 - 8, G 1.5
 12  I         GHI -A      ABI -H      GHI -D      AHI -G   A 6 - 6, G 1.5 - 3, H 1.5
 13  A         AHI -G      ABI +1      AHI -G      AHI +1
 14  H         AHI +1      ABH -I      AHI +1      AHI +1
 15  C         miss        miss        miss        miss
"""
EXPECTED = {"lru": 8, "lfu": 7, "fifo": 6, "gdsf": 9}


@pytest.mark.parametrize("name", POLICIES)
def test_a_trace_replayed_by_hand(name: str) -> None:
    assert sum(policy_hits(HAND, POLICIES[name], 3, 4096)) == EXPECTED[name]


def test_the_bounds_of_the_trace_replayed_by_hand() -> None:
    """Ten repeats in all. D at 6 and C at 15 would both have to wait beside A and B: one of them is lost."""
    assert sum(infinite_hits(HAND)) == 10
    assert sum(clairvoyant_hits(HAND, 3)) == 9


def test_a_request_longer_than_the_pool_keeps_its_beginning() -> None:
    replay = Replay(POLICIES["lru"], 2)
    assert [replay.request((1, 2, 3)), replay.request((1, 2, 3)), replay.num_resident] == [0, 2, 2]


def test_two_requests_share_what_they_have_in_common_and_no_more() -> None:
    replay = Replay(POLICIES["lru"], 99)
    assert [replay.request(chain) for chain in [(1, 2, 3), (1, 2, 4), (1,), (1, 2, 3), ()]] == [0, 2, 1, 3, 0]
    assert replay.num_resident == 4


def test_a_policy_that_spares_everybody_is_refused() -> None:
    with pytest.raises(ConfigError, match="spares all 1 candidates"):
        policy_hits([(1,), (2,)], lambda candidates, need: [], 1)


def _chains(paths: list[list[int]]) -> list[tuple[int, ...]]:
    numbers: dict[tuple[int, ...], int] = {}
    return [
        tuple(numbers.setdefault(tuple(path[: end + 1]), len(numbers)) for end in range(len(path))) for path in paths
    ]


untimed = settings(deadline=None)  # how long an example takes says nothing here
traces = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=25).map(_chains)
short_traces = st.lists(st.lists(st.integers(0, 1), max_size=3), max_size=8).map(_chains)


def block_by_block(chains: list[tuple[int, ...]], num_blocks: int, rank: Callable[[list[int]], int]) -> list[int]:
    """Each block on its own: ``[created, last used, uses, parent]``; one leaf goes at a time."""
    pool: dict[int, list[int]] = {}
    hits = []
    for now, whole in enumerate(chains, 1):
        chain = whole[:num_blocks]
        missing = next((at for at, block in enumerate(chain) if block not in pool), len(chain))
        hits.append(missing)
        for block in chain[:missing]:
            pool[block][1:3] = [now, pool[block][2] + 1]
        for at in range(missing, len(chain)):
            if len(pool) == num_blocks:
                parents = {record[3] for record in pool.values()}
                leaves = [block for block in pool if block not in parents and pool[block][1] < now]
                del pool[min(leaves, key=lambda block: (rank(pool[block]), pool[block][1]))]
            pool[chain[at]] = [now, now, 1, chain[at - 1] if at else -1]
    return hits


@pytest.mark.parametrize(("name", "rank"), [("lru", lambda r: r[1]), ("lfu", lambda r: r[2]), ("fifo", lambda r: r[0])])
@untimed
@given(chains=traces, num_blocks=st.integers(1, 12))
def test_runs_of_blocks_replay_as_single_blocks_do(
    name: str, rank: Callable[[list[int]], int], chains: list[tuple[int, ...]], num_blocks: int
) -> None:
    assert policy_hits(chains, POLICIES[name], num_blocks) == block_by_block(chains, num_blocks, rank)


@untimed
@given(chains=traces, num_blocks=st.integers(1, 12))
def test_no_policy_beats_the_clairvoyant_pool_and_that_not_the_infinite(
    chains: list[tuple[int, ...]], num_blocks: int
) -> None:
    """``run`` raises otherwise; here with the comparison of its own."""
    trace = Trace("drawn", 512, tuple(chains))
    result = run(trace, blocks=[num_blocks], ties=list(TIES))
    best = sum(clairvoyant_hits(chains, num_blocks))
    assert len(result.rows) == len(POLICIES) * len(TIES)
    assert all(row.num_hits <= best <= result.infinite for row in result.rows)
    assert all(row.work_saved <= result.infinite_work for row in result.rows)
    assert sum(policy_hits(chains, POLICIES["lru"], 10_000)) == result.infinite == sum(clairvoyant_hits(chains, 10_000))


@untimed
@given(chains=traces, num_blocks=st.integers(1, 12), name=st.sampled_from(sorted(POLICIES)))
def test_a_pool_is_never_exceeded(chains: list[tuple[int, ...]], num_blocks: int, name: str) -> None:
    replay = Replay(partial(POLICIES[name], ties=TIES["newest"]), num_blocks)
    for chain in chains:
        replay.request(chain)
        assert replay.num_resident <= num_blocks
        assert replay.request(chain) == min(len(chain), num_blocks)


@untimed
@given(chains=short_traces, num_blocks=st.integers(1, 4))
def test_the_clairvoyant_pool_is_the_best_of_all_runs_that_keep_whole_prefixes(
    chains: list[tuple[int, ...]], num_blocks: int
) -> None:
    parent = {block: chain[at - 1] if at else None for chain in chains for at, block in enumerate(chain)}
    best: dict[frozenset[int], int] = {frozenset(): 0}
    for chain in chains:
        after: dict[frozenset[int], int] = {}
        for kept, hits in best.items():
            hits += next((at for at, block in enumerate(chain) if block not in kept), len(chain))
            for choice in _subsets(sorted(kept | set(chain)), num_blocks):
                if all(parent[block] is None or parent[block] in choice for block in choice):
                    after[choice] = max(after.get(choice, 0), hits)
        best = after
    assert sum(clairvoyant_hits(chains, num_blocks)) == max(best.values())


def _subsets(blocks: list[int], at_most: int) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for block in blocks:
        found += [subset | {block} for subset in found if len(subset) < at_most]
    return found
