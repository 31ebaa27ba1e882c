"""TextStream: shown pieces add up to the text, whole characters only, nothing of a stop string ever."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.generation import TextStream
from tests import tiny

BYTES = tiny.tokenizer()


def encode(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False))


def decode(token_ids: Sequence[int]) -> str:
    return ChatFrame(BYTES).decode(token_ids)


def run(token_ids: Sequence[int], stop: Sequence[str] = ()) -> tuple[list[str], TextStream]:
    """What was shown, piece by piece, as a generation does it: it ends when a stop string was seen."""
    stream = TextStream(decode, stop)
    pieces = []
    for token_id in token_ids:
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    pieces.append(stream.flush())
    return pieces, stream


@pytest.mark.parametrize("text", ["plain", "naïve 漢字 🜁 e\u0301", "a\n\n b\t", " leading", "� is a character too"])
def test_pieces_add_up_to_the_text(text: str) -> None:
    pieces, stream = run(encode(text))
    assert "".join(pieces) == text == stream.text
    assert not stream.stopped


def test_half_a_character_is_held_back() -> None:
    pieces, _ = run(encode("a漢b"))
    assert pieces == ["a", "", "", "漢", "b", ""]


def test_an_incomplete_last_character_is_dropped() -> None:
    pieces, stream = run(encode("a漢")[:-1])
    assert "".join(pieces) == "a"
    assert stream.text == "a"


def test_broken_bytes_in_the_middle_do_not_hold_the_rest_back() -> None:
    broken = [*encode("a"), encode("漢")[0], *encode("bc")]
    pieces, stream = run(broken)
    assert stream.text == decode(broken)
    assert stream.text.endswith("bc")
    assert "".join(pieces) == stream.text


def test_special_tokens_have_no_text() -> None:
    special = BYTES.convert_tokens_to_ids("<|im_start|>")
    assert run([*encode("a"), special, *encode("b")])[1].text == "ab"


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one STOP two", ["STOP"], "one "),
        ("STOP", ["STOP"], ""),
        ("a STO b", ["STOP"], "a STO b"),
        ("a SSTOP b", ["STOP"], "a S"),
        ("a STSTOP b", ["STOP"], "a ST"),
        ("x END y STOP", ["STOP", "END"], "x "),
        ("aab", ["ab", "aab"], ""),
        ("漢字。終", ["。"], "漢字"),
        ("tail STO", ["STOP"], "tail STO"),
        ("a\n\nb", ["\n\n"], "a"),
        ("abab", ["abab"], ""),
    ],
)
def test_text_ends_right_before_the_first_stop_string(text: str, stop: list[str], expected: str) -> None:
    pieces, stream = run(encode(text), stop)
    assert stream.text == expected == "".join(pieces)
    assert stream.stopped == any(s in text for s in stop)


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    pieces, _ = run(encode("a STxb"), ["STOP"])
    assert pieces == ["a", " ", "", "", "STx", "b", ""]


def test_held_back_text_is_shown_at_the_end() -> None:
    pieces, stream = run(encode("a ST"), ["STOP"])
    assert pieces[-1] == "ST"
    assert not stream.stopped


@settings(max_examples=150)
@given(st.text("abc漢 ", max_size=14), st.lists(st.text("abc漢", min_size=1, max_size=3), max_size=3))
def test_any_text_and_any_stops_equal_a_plain_search(text: str, stop: list[str]) -> None:
    pieces, stream = run(encode(text), stop)
    # Oracle: the text as it grows character by character, searched from the front.
    expected = text
    for size in range(len(text) + 1):
        found = [text[:size].find(s) for s in stop if s in text[:size]]
        if found:
            expected = text[: min(found)]
            break
    assert stream.text == expected
    assert "".join(pieces) == expected
    shown = ""
    for piece in pieces:
        shown += piece
        assert expected.startswith(shown)


def test_a_tokenizer_that_decodes_differently_at_the_start_is_followed() -> None:
    """SentencePiece drops the space of the first word of a text: ids must be decoded with their context."""
    pieces = {1: "▁one", 2: "▁two", 3: "s"}

    def sentencepiece(token_ids: Sequence[int]) -> str:
        return "".join(pieces[t] for t in token_ids).replace("▁", " ").removeprefix(" ")

    stream = TextStream(sentencepiece, ())
    assert [stream.push(t) for t in (1, 2, 3, 1)] == ["one", " two", "s", " one"]
    assert stream.flush() == ""
    assert stream.text == "one twos one"
