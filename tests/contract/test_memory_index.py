"""The index of one process, held to the shipped contract, and what only it promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph.index.base import ExtentRecord, Index, cover
from aaflow_langgraph.index.memory import MemoryIndex
from aaflow_langgraph.testing.colours import Awaited
from aaflow_langgraph.testing.index_cases import LEASE_S, OWNER, query, record, sequence
from aaflow_langgraph.testing.index_contract import IndexContract


class TestMemoryIndex(IndexContract):
    def make_index(self, clock: Callable[[], float]) -> Index:
        return MemoryIndex(clock)


class TestMemoryIndexAwaited(IndexContract):
    def make_index(self, clock: Callable[[], float]) -> Index:
        return cast(Index, Awaited(MemoryIndex(clock)))


def sizes(index: MemoryIndex) -> dict[str, int]:
    return {name: len(value) for name, value in vars(index).items() if isinstance(value, dict)}


def test_misses_and_whole_lives_leave_every_table_as_it_was() -> None:
    """langgraph#8754: tables with defaults grow on reads unless somebody looks."""
    index = MemoryIndex()
    epoch = index.join(OWNER, 1e6)
    empty = sizes(index)
    for ids in (sequence("AB", 7), sequence("", 3)):
        index.release(index.match(query(ids), len(ids), LEASE_S).receipt)
        index.covering(query(ids))
        index.remove(7, OWNER)
        index.candidates(OWNER)
        index.check()
        assert sizes(index) == empty
    ids = sequence("AB", 7)
    root, first = index.put(record(index, ids, 0, 300), epoch, LEASE_S)
    leaf, second = index.put(record(index, ids, 300, len(ids), parent=root.extent_id), epoch, LEASE_S)
    for receipt in (first, second, index.match(query(ids, 300), len(ids), LEASE_S).receipt):
        assert index.release(receipt)
    assert index.remove(leaf.extent_id, OWNER)
    assert index.remove(root.extent_id, OWNER)
    assert sizes(index) == empty


def test_check_sees_what_is_broken() -> None:
    ids = sequence("AB", 7)

    def broken(how: Callable[[MemoryIndex, ExtentRecord, ExtentRecord], object]) -> set[str]:
        index = MemoryIndex()
        epoch = index.join(OWNER, 1e6)
        root, _ = index.put(record(index, ids, 0, 300), epoch, LEASE_S)
        leaf, _ = index.put(record(index, ids, 300, len(ids), parent=root.extent_id), epoch, LEASE_S)
        assert index.check() == []
        how(index, root, leaf)
        return {number for number, _ in index.check()}

    assert "I8" in broken(lambda index, root, leaf: index._by_key.update({root.key: leaf.extent_id}))
    assert "I2" in broken(lambda index, root, leaf: index._children.clear())
    assert "I4" in broken(lambda index, root, leaf: index._by_hash.pop(leaf.end_id))
    assert "I3" in broken(lambda index, root, leaf: index._records.pop(root.extent_id))
    assert "I2" in broken(lambda index, root, leaf: index._readers.clear())
    assert "I2" in broken(lambda index, root, leaf: index._leases.clear())
    assert "I7" in broken(lambda index, root, leaf: index._owners.clear())


@st.composite
def stored(draw: st.DrawFn) -> list[tuple[tuple[int, ...], int, int, int, tuple[int, ...]]]:
    """Extents of random sequences over two letters: (ids, start, stop, canonical_stop, borders)."""
    made = []
    for _ in range(draw(st.integers(0, 6))):
        ids = sequence(draw(st.text("AB", max_size=3)), draw(st.sampled_from([0, 1, 40])))
        if ids:
            start = draw(st.integers(0, len(ids) - 1))
            stop = draw(st.integers(start + 1, len(ids)))
            canonical = draw(st.sampled_from([0, stop // 256 * 256])) if start == 0 else 0
            inside = [place for place in (1, 100, 256, 300, 512, 700) if start < place < stop]
            borders = () if canonical or not inside else tuple(sorted(draw(st.sets(st.sampled_from(inside)))))
            made.append((ids, start, stop, canonical, borders))
    return made


@settings(max_examples=120, deadline=None)
@given(stored(), st.text("AB", max_size=3), st.sampled_from([0, 1, 40]), st.integers(0, 900), st.booleans())
def test_cover_reads_right_tokens_without_gaps_as_far_as_anything_reaches(
    extents: list[tuple[tuple[int, ...], int, int, int, tuple[int, ...]]],
    letters: str,
    tail: int,
    limit: int,
    canonical: bool,
) -> None:
    index = MemoryIndex()
    records = [record(index, ids, a, b, canonical_stop=c, borders=inside) for ids, a, b, c, inside in extents]
    ids = sequence(letters, tail)
    borders = [b for *_, stop, _, inside in extents for b in (*inside, stop) if b <= len(ids)]
    parts, stop = cover(records, query(ids, *borders, canonical=canonical), limit)

    at = 0
    for found, start, end in parts:
        assert start == at < end <= found.stop
        assert found.start <= start
        assert found.token_ids[start - found.start : end - found.start] == ids[start:end]
        assert not canonical or end <= max(found.canonical_stop, 0)
        at = end
    assert at == stop <= min(limit, len(ids))

    # Oracle: an extent serves every position up to the last one where it and the whole query before it agree.
    reach = 0
    ends = []
    for (source, _, b, c, inside), found in zip(extents, records, strict=True):
        same = 0
        while same < min(len(source), len(ids)) and source[same] == ids[same]:
            same += 1
        blocks = (min(same, c if canonical else b) // 256) * 256
        end = max([blocks, *(place for place in (*inside, b) if not canonical and place <= same)])
        ends.append((found.start, min(end, limit)))
    for _ in ends:
        reach = max([reach, *(end for start, end in ends if start <= reach)])
    assert stop == reach
