"""Whole prompts as token ids: the nearest known prefix is reused to the token, and the journal says what could have been."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aaflow_langgraph import KVBroker, Sampling
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import Cancelled, ConfigError, RecipeMissing
from aaflow_langgraph.journal import origin
from aaflow_langgraph.model import Span, Turn
from tests.oracle import prose, stock_of

Open = Callable[..., KVBroker]
FEW = Sampling(max_tokens=4)


def ids_of(text: str) -> tuple[int, ...]:
    """One token a letter, as the tiny tokenizer has it."""
    return tuple(5 + ord(letter) % 256 for letter in text)


@pytest.mark.parametrize("shared", [40, 255, 256, 300, 700])
def test_a_prompt_beside_a_known_one_reuses_every_shared_token(open_broker: Open, shared: int) -> None:
    broker = open_broker()
    first = ids_of(prose(shared + 30, seed=1))
    other = first[:shared] + ids_of("?!" + prose(20, seed=2))
    broker.complete(first, sampling=FEW)
    found = broker.nearest(other)
    generation = broker.complete(other, sampling=FEW)
    assert found.num_shared == shared
    assert generation.usage.num_reused == shared
    assert generation.token_ids == stock_of(broker.engine).greedy(other, 4)


def test_a_conversation_given_whole_each_time_reuses_prompt_and_answer(open_broker: Open) -> None:
    broker = open_broker()
    ids = ids_of(prose(300))
    known = 0
    for turn in range(4):
        generation = broker.complete(ids, end_of_turn=(2,), sampling=FEW)
        assert generation.token_ids == stock_of(broker.engine).greedy(ids, 4)
        if turn:
            # All but the last sampled token and the end of turn, which nobody has run yet.
            assert generation.usage.num_reused >= known - 2
        known = generation.handle.kv_tokens
        ids = broker.tokens_of(generation.handle.kv_id) + ids_of(prose(30, seed=turn))
    assert broker.nearest(ids).kv_id == generation.handle.kv_id


def test_turns_and_the_end_of_turn_are_in_the_recipe(open_broker: Open) -> None:
    broker = open_broker()
    ids = ids_of(prose(50))
    turns = (Turn("user", Span(3, 48), False),)
    generation = broker.complete(ids, turns=turns, end_of_turn=(2, 7), sampling=FEW)
    recipe = broker.recipe(generation.handle)
    assert recipe.turns == (*turns, Turn("assistant", Span(50, 50 + len(generation.token_ids)), False))
    assert recipe.token_ids[-2:] == (2, 7)
    assert recipe.num_pending >= 2


def test_what_is_near_is_found_on_disk_after_a_restart(engines: Callable[..., TransformersEngine], tmp_path) -> None:  # type: ignore[no-untyped-def]
    ids = ids_of(prose(300))
    with KVBroker.open(engines("llama"), pool_bytes=8 << 20, disk=tmp_path) as before:
        told = before.complete(ids, sampling=FEW).handle.kv_id
    with KVBroker.open(engines("llama"), pool_bytes=8 << 20, disk=tmp_path) as after:
        assert after.nearest(ids).kv_id is None
        generation = after.complete((*ids[:290], 9, 9), near=[told, "f" * 64], sampling=FEW)
        assert generation.usage.num_reused == 290
        assert generation.token_ids == stock_of(after.engine).greedy((*ids[:290], 9, 9), 4)


def test_without_kv_everything_is_prefilled_and_the_answers_are_the_same(
    engines: Callable[..., TransformersEngine],
) -> None:
    with (
        KVBroker.open(engines("llama"), pool_bytes=8 << 20) as on,
        KVBroker.open(engines("llama"), pool_bytes=8 << 20, kv=False) as off,
    ):
        for broker in (on, off):
            docs = broker.prefill(prose(300)).handle
            plans = [
                broker.generate(f"plan {number}", parent=docs, sampling=FEW, deterministic=True) for number in range(2)
            ]
            ends = [broker.generate("end", parent=plan.handle, sampling=FEW, deterministic=True) for plan in plans]
            texts = [generation.token_ids for generation in (*plans, *ends)]
            if broker is on:
                expected, handles = texts, [one.handle for one in ends]
        assert texts == expected
        assert [one.handle for one in ends] == handles
        assert off.stats().num_reused_tokens == 0
        assert off.stats().num_extents == 0
        assert off.stats().num_prefilled_tokens > on.stats().num_prefilled_tokens
        assert not off.kv
        assert off.check() == []


def test_one_request_can_do_without_kv(open_broker: Open) -> None:
    broker = open_broker()
    ids = ids_of(prose(300))
    first = broker.complete(ids, sampling=FEW)
    again = broker.complete(ids, sampling=FEW, kv=False)
    assert again.token_ids == first.token_ids
    assert again.usage.num_reused == 0
    assert broker.complete(ids, sampling=FEW).usage.num_reused == 299


def test_the_journal_says_who_asked_what_was_reused_and_what_could_have_been(open_broker: Open) -> None:
    broker = open_broker()
    ids = ids_of(prose(300))
    with origin(node="read", thread="t1"):
        docs = broker.materialize(ids, label="docs")
    with origin(node="ask", thread="t1"):
        answer = broker.complete((*ids, 9), sampling=FEW).handle
    broker.evict(answer)
    assert broker.stats().num_extents == 0
    broker.complete((*ids[:-1], 9), sampling=FEW)
    read, ask, after = broker.journal.entries()
    assert (read.operator, read.node, read.thread, read.label) == ("materialize", "read", "t1", "docs")
    assert (read.num_context, read.num_reused, read.num_reusable, read.nearest) == (300, 0, 0, None)
    assert (ask.node, ask.num_reused, ask.num_reusable, ask.nearest) == ("ask", 300, 300, docs.kv_id)
    assert ask.parent == docs.kv_id
    assert (after.node, after.num_reused < after.num_reusable, after.num_nearest) == ("", True, 299)
    assert broker.journal.since(read.number) == (ask, after)


def test_several_that_ask_for_the_same_new_prompt_compute_its_blocks_once(open_broker: Open) -> None:
    broker = open_broker()
    broker.complete(ids_of(prose(40)), sampling=FEW)
    ids = ids_of(prose(40) + prose(600, seed=3))
    done: list[int] = []
    gate = threading.Barrier(4)

    def ask(number: int) -> None:
        gate.wait()
        done.append(broker.complete((*ids, number), sampling=FEW).usage.num_reused)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(done)[0] == 40
    assert sorted(done)[1] >= 512


def test_bad_input_is_said(open_broker: Open) -> None:
    broker = open_broker()
    with pytest.raises(ConfigError, match="no token ids"):
        broker.complete(())
    with pytest.raises(ConfigError, match="vocabulary"):
        broker.complete((1, 99999))
    with pytest.raises(ConfigError, match="64 lower-case hex"):
        broker.complete((1, 2), near=["x"])
    with pytest.raises(ConfigError, match="sampling"):
        broker.complete((1, 2), sampling=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv must be"):
        broker.complete((1, 2), kv=1)  # type: ignore[arg-type]
    with pytest.raises(RecipeMissing, match="no recipe"):
        broker.tokens_of("a" * 64)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Cancelled):
        broker.complete((1, 2), cancel=stop)
    with pytest.raises(ConfigError, match="kv must be"):
        KVBroker.open(broker.engine, kv="no")  # type: ignore[arg-type]
