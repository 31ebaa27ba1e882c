"""The nearest known sequence, against a search through all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.hashing import block_hashes
from aaflow_langgraph.model import BLOCK_TOKENS
from aaflow_langgraph.nearest import PrefixTable

NAMESPACE = "0" * 64


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@st.composite
def trees(draw: st.DrawFn) -> tuple[list[tuple[int, tuple[int, ...]]], tuple[int, ...]]:
    """Sequences as ``(start of the own part, tokens)``, each the child of an earlier one, and a query."""
    lengths = st.sampled_from((1, 2, 3, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 2 * BLOCK_TOKENS))

    def grown(base: tuple[int, ...]) -> tuple[int, ...]:
        """Runs of one token: long common prefixes are likely."""
        return base + (draw(st.integers(0, 2)),) * draw(lengths)

    known: list[tuple[int, tuple[int, ...]]] = []
    for _ in range(draw(st.integers(1, 8))):
        base = draw(st.sampled_from(known))[1] if known and draw(st.booleans()) else ()
        known.append((len(base), grown(base)))
    base = draw(st.sampled_from(known))[1]
    return known, grown(base[: draw(st.integers(0, len(base)))])


@given(trees())
def test_the_nearest_sequence_shares_as_much_as_any(
    case: tuple[list[tuple[int, tuple[int, ...]]], tuple[int, ...]],
) -> None:
    known, asked = case
    table = PrefixTable()
    for number, (start, ids) in enumerate(known):
        table.add(str(number), ids, block_hashes(NAMESPACE, ids), start)
    best = max(common(ids, asked) for _, ids in known)
    found = table.candidates(asked, block_hashes(NAMESPACE, asked))
    assert max((one.num_shared for one in found), default=0) == best
    for one in found:
        assert one.kv_id is not None
        assert common(known[int(one.kv_id)][1], asked) == one.num_shared


def test_an_empty_table_knows_nothing() -> None:
    assert PrefixTable().candidates((1, 2, 3), ()) == []
