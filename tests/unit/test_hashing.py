"""Chained block hashes: equal in every process, different as soon as anything they commit to differs."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aaflow_langgraph.hashing import block_hashes, digest, prefix_id, token_bytes
from aaflow_langgraph.model import BLOCK_TOKENS

N, M = "a" * 64, "b" * 64
IDS = tuple((7 * n + 3) % 50_000 for n in range(3 * BLOCK_TOKENS + 10))
PINNED = (
    "e97418676da8c1614066853b95504efbcfeef74fd77b9cee48dd0166fe9989e5",
    "0211529dfdf6d53af2a5e1cfd4cdea2e95e466376259133d784fed3167548e81",
    "9a8877daadd9632f07feb648f272e60ee899b7520ce852e04980774221dce0d5",
)

tags = st.text(max_size=8)
fields = st.lists(st.binary(max_size=8) | st.text(max_size=8), max_size=4)


def test_a_digest_is_blake2b_over_length_prefixed_fields() -> None:
    """Written down once more by hand: what is stored today must be found by every later version."""
    state = hashlib.blake2b(digest_size=32)
    for raw in (b"kv", b"ns", b"\x01\x02"):
        state.update(len(raw).to_bytes(8, "little") + raw)
    assert digest("kv", "ns", b"\x01\x02") == state.hexdigest()


def test_ids_of_known_tokens_are_the_same_in_every_process() -> None:
    hashes = block_hashes(N, IDS)
    assert (hashes[0], hashes[2], prefix_id(N, IDS, len(IDS), hashes)) == PINNED


@given(tags, fields, tags, fields)
def test_no_two_field_lists_share_a_digest(
    tag: str, items: list[bytes | str], other_tag: str, other: list[bytes | str]
) -> None:
    def raw(name: str, parts: list[bytes | str]) -> list[bytes]:
        return [p.encode() if isinstance(p, str) else p for p in (name, *parts)]

    assert (digest(tag, *items) == digest(other_tag, *other)) == (raw(tag, items) == raw(other_tag, other))


def test_fields_do_not_run_into_each_other() -> None:
    assert digest("t", "ab", "c") != digest("t", "a", "bc")
    assert digest("t", "") != digest("t")
    assert digest("ta") != digest("t", "a")


def test_token_bytes_are_little_endian_32_bit() -> None:
    assert token_bytes([1, 258, 2**32 - 1]) == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\xff"
    for bad in ([-1], [2**32]):
        with pytest.raises(OverflowError):
            token_bytes(bad)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 511, 512, 513])
def test_only_full_blocks_are_hashed(size: int) -> None:
    assert len(block_hashes(N, IDS[:size])) == size // BLOCK_TOKENS


def test_a_hash_commits_to_every_token_before_it() -> None:
    before = block_hashes(N, IDS)
    for position in (0, 255, 256, 700):
        changed = list(IDS)
        changed[position] += 1
        after = block_hashes(N, changed)
        first = position // BLOCK_TOKENS
        assert after[:first] == before[:first]
        assert all(a != b for a, b in zip(after[first:], before[first:], strict=True))


def test_hashing_goes_on_from_known_hashes() -> None:
    whole = block_hashes(N, IDS)
    for known in range(len(whole) + 1):
        assert block_hashes(N, IDS, whole[:known]) == whole


def test_namespaces_never_meet() -> None:
    assert not set(block_hashes(N, IDS)) & set(block_hashes(M, IDS))
    assert prefix_id(N, [1, 2], 2, ()) != prefix_id(M, [1, 2], 2, ())


@pytest.mark.parametrize("stop", [1, 255, 256, 257, 512, 700, len(IDS)])
def test_a_prefix_is_named_as_if_it_stood_alone(stop: int) -> None:
    alone = IDS[:stop]
    assert prefix_id(N, IDS, stop, block_hashes(N, IDS)) == prefix_id(N, alone, stop, block_hashes(N, alone))


def test_an_id_is_never_a_block_hash() -> None:
    """Both may name the same 256 tokens; one digest must not answer for the other."""
    hashes = block_hashes(N, IDS[:BLOCK_TOKENS])
    assert prefix_id(N, IDS, BLOCK_TOKENS, hashes) not in hashes


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_equal_ids_mean_equal_tokens(a: list[int], b: list[int]) -> None:
    assert (prefix_id(N, a, len(a), ()) == prefix_id(N, b, len(b), ())) == (a == b)
