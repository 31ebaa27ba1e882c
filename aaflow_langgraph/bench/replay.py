"""Replays a trace of prefixes through a policy, and through one that knows the future. Knows no file and no model.

A pool holds N blocks. A request is a chain of blocks; it *hits* those of its first blocks that are there, up to the first
that is not, computes the rest and stores them. What it needs room for is taken from leaves that the request itself does not
read (I3). A request longer than the pool keeps its first N blocks. Requests run one at a time.

As in the store, a candidate is a run of blocks with one history, not a block: a run is cut where two requests part. Unlike
the store, the last victim is trimmed from its end by just as many blocks as are needed, so that a pool is always used to
its last block and the result is that of block-wise eviction; and the policy is asked again whenever an eviction has made a
new leaf.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.evict.base import Candidate, Policy

Chains = Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class _Run:
    """Blocks ``[start, start + len(blocks))`` of a prefix with one history; a node of the prefix tree."""

    number: int
    parent: _Run | None
    start: int
    blocks: Sequence[int]
    created: int
    last_used: int
    num_uses: int = 1
    children: dict[int, _Run] = field(default_factory=dict)


class Replay:
    """A pool of ``num_blocks`` blocks under ``policy``. ``request`` returns the blocks hit; the pool is never exceeded.

    A block counts ``block_tokens`` tokens and as many bytes: sizes are only compared, and a trace knows no model.
    """

    def __init__(self, policy: Policy, num_blocks: int, block_tokens: int = 1) -> None:
        self.num_resident = 0
        self._policy = policy
        self._num_blocks = num_blocks
        self._block_tokens = block_tokens
        self._now = 0
        self._num_runs = 0
        self._root = _Run(0, None, 0, (), 0, 0)
        self._leaves: dict[int, tuple[_Run, Candidate]] = {}

    def request(self, chain: Sequence[int]) -> int:
        """Look the chain up, store what is missing, return how many blocks were there."""
        self._now += 1
        chain = chain[: self._num_blocks]
        run, num_hit, path = self._root, 0, []
        while num_hit < len(chain) and (child := run.children.get(chain[num_hit])) is not None:
            shared = _num_shared(child.blocks, chain[num_hit : num_hit + len(child.blocks)])
            if shared < len(child.blocks):
                self._cut(child, shared)
            run = child
            num_hit += shared
            path.append(child)
        for touched in path:
            touched.last_used = self._now
            touched.num_uses += 1
        self._leaves.pop(run.number, None)
        rest = chain[num_hit:]
        self._make_room(len(rest))
        if rest:
            child = self._new_run(run, num_hit, rest, self._now, self._now, 1)
            run.children[rest[0]] = child
            self.num_resident += len(rest)
            run = child
        if not run.children and run is not self._root:
            self._add_leaf(run)
        return num_hit

    def _make_room(self, num_blocks: int) -> None:
        while (need := self.num_resident + num_blocks - self._num_blocks) > 0:
            candidates = [candidate for _, candidate in self._leaves.values()]
            victims = self._policy(candidates, need * self._block_tokens)
            if not victims:
                raise ConfigError(
                    f"the policy spares all {len(candidates)} candidates of a pool that needs {need} blocks"
                )
            for victim in victims:
                run, _ = self._leaves.pop(victim.extent_id)
                num_cut = min(need, len(run.blocks))
                need -= num_cut
                self.num_resident -= num_cut
                if num_cut < len(run.blocks):
                    run.blocks = run.blocks[: len(run.blocks) - num_cut]
                    self._add_leaf(run)
                    break
                parent = run.parent
                assert parent is not None
                del parent.children[run.blocks[0]]
                if not parent.children and parent is not self._root and parent.last_used != self._now:
                    self._add_leaf(parent)
                    break

    def _add_leaf(self, run: _Run) -> None:
        tokens = len(run.blocks) * self._block_tokens
        start = run.start * self._block_tokens
        candidate = Candidate(run.number, tokens, tokens, run.last_used, run.num_uses, run.created, start)
        self._leaves[run.number] = (run, candidate)

    def _cut(self, run: _Run, num_blocks: int) -> None:
        """``run`` keeps its first ``num_blocks``; the rest becomes its child, with the same history."""
        was_leaf = self._leaves.pop(run.number, None) is not None
        rest = run.blocks[num_blocks:]
        child = self._new_run(run, run.start + num_blocks, rest, run.created, run.last_used, run.num_uses)
        child.children = run.children
        for grandchild in child.children.values():
            grandchild.parent = child
        run.blocks = run.blocks[:num_blocks]
        run.children = {rest[0]: child}
        if was_leaf:
            self._add_leaf(child)

    def _new_run(
        self, parent: _Run, start: int, blocks: Sequence[int], created: int, last_used: int, num_uses: int
    ) -> _Run:
        self._num_runs += 1
        return _Run(self._num_runs, parent, start, blocks, created, last_used, num_uses)


def _num_shared(blocks: Sequence[int], chain: Sequence[int]) -> int:
    if blocks == chain:
        return len(blocks)
    return next((i for i, (a, b) in enumerate(zip(blocks, chain, strict=False)) if a != b), len(chain))


def policy_hits(chains: Chains, policy: Policy, num_blocks: int, block_tokens: int = 1) -> list[int]:
    """Blocks that each request hits in a pool of ``num_blocks`` blocks, empty at first, under ``policy``."""
    replay = Replay(policy, num_blocks, block_tokens)
    return [replay.request(chain) for chain in chains]


def infinite_hits(chains: Chains) -> list[int]:
    """Blocks of each request that were asked for before: what a pool without end would hit."""
    seen: set[int] = set()
    hits = []
    for chain in chains:
        hits.append(sum(block in seen for block in chain))
        seen.update(chain)
    return hits


def clairvoyant_hits(chains: Chains, num_blocks: int) -> list[int]:
    """Blocks hit by a pool that knows the whole trace and may decline to store: no policy hits more over the trace.

    Belady's rule (IBM Systems Journal 5(2), 1966) over single block references, in order: of the resident blocks and the
    one just read, the one whose next use is farthest is not kept.

    Why it is a bound. Every run of ``Replay``, whatever its policy, is also a legal run of a plain cache over the same
    references in the same order: the blocks it hits are resident when each is read, and it stores no block before that
    block is read. The plain cache may do more (keep a block without its prefix, evict what the request reads, not store),
    and on unit sizes Belady's rule with bypass has the most hits of all plain runs.

    Why it is no loose one. A block's next use never comes before that of a block it builds on, so the rule evicts leaves
    first by itself, and every block it hits has its whole prefix resident (``AssertionError`` otherwise). What a policy of
    ``Replay`` cannot do is decline to store: that, and knowing the future, is all the difference.
    """
    references = [block for chain in chains for block in chain]
    never = len(references)
    next_use = [never] * len(references)
    upcoming: dict[int, int] = {}
    for at in range(len(references) - 1, -1, -1):
        next_use[at] = upcoming.get(references[at], never)
        upcoming[references[at]] = at
    resident: dict[int, int] = {}  # block: its next use
    farthest: list[tuple[int, int]] = []  # (-next use, block); entries that a later use overtook are skipped
    hits = []
    at = 0
    for chain in chains:
        num_hit, whole = 0, True
        for block in chain:
            hit = block in resident
            assert not hit or whole, "Belady's rule kept a block without its prefix"
            whole = hit
            num_hit += hit
            if next_use[at] < never:
                resident[block] = next_use[at]
                heapq.heappush(farthest, (-next_use[at], block))
            elif hit:
                del resident[block]
            at += 1
            while len(resident) > num_blocks:
                use, candidate = heapq.heappop(farthest)
                if resident.get(candidate) == -use:
                    del resident[candidate]
        hits.append(num_hit)
    return hits
