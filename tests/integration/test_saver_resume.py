"""A thread whose process ended goes on in another one: what is stored, what is computed again, and from which checkpoint."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from aaflow_langgraph import KVBroker, KVCheckpointSaver, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.assets import demo_model
from aaflow_langgraph.cli import main
from aaflow_langgraph.inspection import check
from tests.brokers import Host, host  # noqa: F401
from tests.oracle import stock_of
from tests.real import real_cache  # noqa: F401
from tests.talks import SHORT, THREAD, Talker, go_on, questions, talking

TURNS = 30


def files(place: Path) -> list[Path]:
    return sorted((place / "checkpoints.sqlite.kv" / "extents").glob("[0-9a-f]*/*/*.safetensors"))


def largest_step(place: Path) -> int:
    """Bytes that the inner saver stores for a step: its checkpoint and what its tasks wrote."""
    with closing(sqlite3.connect(place / "checkpoints.sqlite")) as db:
        (found,) = db.execute(
            "SELECT MAX(LENGTH(c.checkpoint) + LENGTH(c.metadata) + (SELECT COALESCE(SUM(LENGTH(w.value)), 0) FROM writes w "
            "WHERE w.thread_id = c.thread_id AND w.checkpoint_id = c.checkpoint_id)) FROM checkpoints c"
        ).fetchone()
    return int(found)


def undisturbed(engine: TransformersEngine, count: int, sampling: Sampling = SHORT) -> list[list[int]]:
    """The answers of a conversation that nobody disturbs, without any saver."""
    answers: list[list[int]] = []
    plan: KVHandle | None = None
    with KVBroker.open(engine, pool_bytes=64 << 20) as broker:
        for question in questions(count):
            heard = broker.prefill(question, parent=plan).handle
            made = broker.generate("Be brief.", parent=heard, sampling=sampling)
            answers.append(list(made.token_ids))
            plan = made.handle
    return answers


# ---------------------------------------------------------------- thirty turns


def test_thirty_turns_store_small_rows_and_every_token_once(
    engines: Callable[..., TransformersEngine], open_broker: Callable[..., KVBroker], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability="sync")
    sizes = []
    for turn in (1, 15, TURNS):
        answers = talker(turn)["answers"]
        sizes.append((largest_step(tmp_path), sum(file.stat().st_size for file in files(tmp_path))))
    assert talker.close() == 0
    assert answers == undisturbed(engines(), TURNS)
    assert max(step for step, _ in sizes) < 5000
    assert sizes[2][0] < sizes[0][0] + 40 * TURNS, "only the list of answers grows"
    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver:
        plan = talking(broker).compile(checkpointer=saver).get_state(THREAD).values["plan"]
        computed = plan.kv_tokens - broker.recipe(plan).num_pending
        kv_bytes = sum(
            stored.num_rows * broker.engine.layout.token_bytes
            for disk in saver._ledger._disks.values()
            for stored in disk.scan()
        )
        # Rows come in twos, an extent for each prefill and each answer: the rest is one copy of each token.
        assert kv_bytes <= (computed + 2 * TURNS) * broker.engine.layout.token_bytes
        assert broker.transfer(plan).num_fetched == computed


# ---------------------------------------------------------------- in a later process


@pytest.mark.parametrize("durability", ["recipe", "evict", "sync", "async"])
def test_after_close_nothing_that_was_kept_is_computed_again(
    durability: str, engines: Callable[..., TransformersEngine], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability=durability)
    first = talker(4)
    assert talker.close() == 0
    later = Talker(tmp_path, host.folder, durability=durability)
    again = later(5)
    assert later.close() == 0
    assert again["answers"] == undisturbed(engines(), 5)
    assert again["answers"][:4] == first["answers"]
    if durability == "recipe":
        assert again["num_recomputed"] > 300
        assert files(tmp_path) == []
    else:
        assert again["num_recomputed"] == 0
        assert again["num_prefilled"] < 100, "the new turn, and no old one"
        assert again["num_fetches"] > 0


def test_with_sync_nothing_is_computed_again_after_a_kill(
    engines: Callable[..., TransformersEngine], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability="sync")
    talker(4)
    talker.kill()
    again = Talker(tmp_path, host.folder, durability="sync")(5)
    assert again["answers"] == undisturbed(engines(), 5)
    assert again["num_recomputed"] == 0
    assert again["num_prefilled"] < 100


@pytest.mark.parametrize("durability", ["recipe", "evict", "async"])
def test_without_sync_a_kill_costs_time_and_no_token(
    durability: str, engines: Callable[..., TransformersEngine], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability=durability)
    talker(4)
    talker.kill()
    assert Talker(tmp_path, host.folder, durability=durability)(5)["answers"] == undisturbed(engines(), 5)


def test_two_processes_with_one_index_take_turns_on_a_thread_and_one_outlives_the_other(
    engines: Callable[..., TransformersEngine], host: Host, tmp_path: Path
) -> None:
    url = f"embedded://{host.folder}/index"
    one, two = (Talker(tmp_path, host.folder, durability="evict", index=url) for _ in range(2))
    prefilled = []
    for turn in range(1, 7):
        told = (one, two)[turn % 2](turn)
        assert told["num_recomputed"] == 0
        prefilled.append(told["num_prefilled"])
    assert max(prefilled) < 100, "what the other process computed is read in place"
    one.kill()
    told = two(7)
    assert told["answers"] == undisturbed(engines(), 7)
    assert two.close() == 0
    third = Talker(tmp_path, host.folder, durability="evict", index=url)
    assert third(8)["answers"] == undisturbed(engines(), 8)
    assert third.close() == 0


# ---------------------------------------------------------------- lost and damaged tensors


def _swap(found: list[Path]) -> None:
    contents = [file.read_bytes() for file in found]
    for file, content in zip(found, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(content)


def _flip(found: list[Path]) -> None:
    for number, file in enumerate(found):
        body = bytearray(file.read_bytes())
        body[len(body) * (number + 1) // (len(found) + 1)] ^= 1 << number % 8
        file.write_bytes(body)


def _truncate(found: list[Path]) -> None:
    for number, file in enumerate(found):
        os.truncate(file, (file.stat().st_size - 1) * number // len(found))


def _delete(found: list[Path]) -> None:
    for file in found:
        file.unlink()


@pytest.mark.parametrize("damage", [_delete, _flip, _truncate, _swap], ids=lambda damage: damage.__name__[1:])
def test_a_thread_goes_on_from_recipes_when_every_file_is_damaged(
    damage: Callable[[list[Path]], None],
    engines: Callable[..., TransformersEngine],
    host: Host,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "PAUSE_S", 0.0)  # nobody is at work while it looks
    talker = Talker(tmp_path, host.folder, durability="evict")
    talker(4)
    assert talker.close() == 0
    found = files(tmp_path)
    assert len(found) >= 8
    damage(found)
    is_reported = damage is _delete or main(["check", "--checkpoints", str(tmp_path), "--payloads"]) == 1
    assert is_reported
    later = Talker(tmp_path, host.folder, durability="evict")
    again = later(5)
    assert again["answers"] == undisturbed(engines(), 5)
    assert again["num_recomputed"] > 0
    assert later.close() == 0
    quarantine = tmp_path / "checkpoints.sqlite.kv" / "extents" / "quarantine"
    moved = list(quarantine.iterdir()) if quarantine.exists() else []
    assert bool(moved) == (damage is not _delete)
    capsys.readouterr()
    assert main(["check", "--checkpoints", str(tmp_path)]) == (1 if moved else 0)
    assert capsys.readouterr().out.count("quarantine/") == len(moved)
    for file in moved:
        file.unlink()
    third = Talker(tmp_path, host.folder, durability="evict")
    assert third(6)["num_recomputed"] == 0, "what was rebuilt was written again"
    third.kill()


# ---------------------------------------------------------------- rollback


def test_replay_updates_and_forks_go_on_from_exactly_their_checkpoints_kv(
    engines: Callable[..., TransformersEngine], open_broker: Callable[..., KVBroker], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability="evict")
    talker(4)
    assert talker.close() == 0
    stock = stock_of(engines())

    def is_what_the_model_says(broker: KVBroker, handle: KVHandle, answer: list[int]) -> bool:
        ids = broker.token_ids(handle)
        recipe = broker.recipe(handle)
        start = recipe.turns[-1].content.start
        return tuple(answer) == stock.greedy(ids[:start], len(answer))

    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path, broker, durability="evict") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        states = list(graph.get_state_history(THREAD))
        newest = states[0]
        old = next(state for state in states if state.next == ("listen",) and len(state.values.get("answers", [])) == 2)
        at_old = old.values["plan"]

        # Replay: the same turn again, on the same KV.
        replayed = graph.invoke(None, old.config)
        assert replayed["answers"] == newest.values["answers"][:3]
        same = next(state for state in states if len(state.values.get("answers", [])) == 3)
        assert replayed["plan"].kv_id == same.values["plan"].kv_id

        # A fork: another question behind the same checkpoint.
        forked = graph.invoke(None, graph.update_state(old.config, {"question": "Something else: who was there?"}))
        assert broker.token_ids(forked["plan"])[: at_old.kv_tokens] == broker.token_ids(at_old)
        assert forked["plan"].kv_id != replayed["plan"].kv_id
        assert is_what_the_model_says(broker, forked["plan"], forked["answers"][-1])

        # An edit: the thread goes on from a handle of long ago.
        first = next(state for state in states if len(state.values.get("answers", [])) == 1).values["plan"]
        graph.update_state(THREAD, {"plan": first}, as_node="answer")
        edited = graph.invoke({"question": "And from here?"}, THREAD)
        assert broker.token_ids(edited["plan"])[: first.kv_tokens] == broker.token_ids(first)
        assert is_what_the_model_says(broker, edited["plan"], edited["answers"][-1])
        assert broker.stats().num_recomputed_tokens == 0

        # The abandoned branch is still there, for itself.
        gone_on = graph.invoke({"question": "Where were we?"}, newest.config)
        assert broker.token_ids(gone_on["plan"])[: newest.values["plan"].kv_tokens] == broker.token_ids(
            newest.values["plan"]
        )
        assert is_what_the_model_says(broker, gone_on["plan"], gone_on["answers"][-1])


def test_a_rollback_to_kv_that_is_gone_rebuilds_just_that(
    engines: Callable[..., TransformersEngine], open_broker: Callable[..., KVBroker], host: Host, tmp_path: Path
) -> None:
    talker = Talker(tmp_path, host.folder, durability="evict")
    answers = talker(4)["answers"]
    assert talker.close() == 0
    shutil.rmtree(tmp_path / "checkpoints.sqlite.kv" / "extents")
    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path, broker, durability="evict") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        old = next(
            state
            for state in graph.get_state_history(THREAD)
            if state.next == ("listen",) and len(state.values.get("answers", [])) == 2
        )
        assert graph.invoke(None, old.config)["answers"] == answers[:3]
        plan = old.values["plan"]
        assert broker.stats().num_recomputed_tokens == plan.kv_tokens - broker.recipe(plan).num_pending


# ---------------------------------------------------------------- the real model


@pytest.mark.slow
def test_thirty_turns_of_the_real_model_take_one_copy_of_their_tokens_on_disk(real_cache: None, tmp_path: Path) -> None:
    sampling = Sampling(max_tokens=5)
    engine = TransformersEngine.load(demo_model(), dtype="bfloat16", device="cpu")
    asked = questions(TURNS)
    answers: list[list[int]] = []
    for count in (TURNS - 1, TURNS):
        with (
            KVBroker.open(engine, pool_bytes=256 << 20) as broker,
            KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver,
        ):
            graph = talking(broker, sampling).compile(checkpointer=saver)
            before, answers = answers, go_on(graph, asked[:count])
            assert answers[: len(before)] == before
            plan = graph.get_state(THREAD).values["plan"]
            stats = broker.stats()
    assert stats.num_recomputed_tokens == 0
    assert stats.num_prefilled_tokens < 60
    assert sum(file.stat().st_size for file in files(tmp_path)) <= 1.05 * engine.layout.num_bytes(plan.kv_tokens)
    assert largest_step(tmp_path) < 5000
    assert answers[:3] == undisturbed(engine, 3, sampling)
