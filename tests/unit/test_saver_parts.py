"""The parts of the checkpointer alone: steps in both colours, locks, the manifest, what waits for its parent."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver

from aaflow_langgraph import KVCheckpointSaver
from aaflow_langgraph.checkpoint.admission import _MAX_WAITING, Waiting
from aaflow_langgraph.checkpoint.inner import Inner
from aaflow_langgraph.checkpoint.locks import ThreadLocks
from aaflow_langgraph.checkpoint.sidecar import Key, RecipeRow, Reference, Sidecar, Slot
from aaflow_langgraph.checkpoint.steps import Call, Steps, arun, run
from aaflow_langgraph.errors import ConfigError, PersistenceError

# ---------------------------------------------------------------- steps


def answered(value: Any) -> Call:
    async def later() -> Any:
        return value

    return Call(lambda: value, later)


def failing(error: BaseException) -> Call:
    def now() -> Any:
        raise error

    async def later() -> Any:
        raise error

    return Call(now, later)


async def in_colour(colour: str, steps: Steps[Any]) -> Any:
    return await arun(steps) if colour == "async" else run(steps)


COLOURS = pytest.mark.parametrize("colour", ["sync", "async"])


@COLOURS
async def test_steps_get_the_answers_of_their_calls_and_give_their_result(colour: str) -> None:
    def steps() -> Steps[int]:
        return (yield answered(1)) + (yield answered(2))

    assert await in_colour(colour, steps()) == 3


@COLOURS
async def test_what_a_call_raises_is_raised_in_the_steps_and_then_to_the_caller(colour: str) -> None:
    seen: list[str] = []

    def steps() -> Steps[str]:
        try:
            yield failing(KeyError("first"))
        except KeyError:
            seen.append("caught")
        try:
            yield failing(ConnectionError("second"))
        finally:
            seen.append("left")
        return "unreachable"

    with pytest.raises(ConnectionError, match="second"):
        await in_colour(colour, steps())
    assert seen == ["caught", "left"]


async def test_async_steps_never_run_on_the_thread_of_the_loop() -> None:
    loop_thread = threading.get_ident()
    threads: list[int] = []

    def steps() -> Steps[None]:
        threads.append(threading.get_ident())
        yield answered(None)
        threads.append(threading.get_ident())

    await arun(steps())
    assert loop_thread not in threads
    assert len(threads) == 2


async def test_a_caller_that_is_cancelled_does_not_stop_the_steps() -> None:
    go_on, done = asyncio.Event(), threading.Event()

    def steps() -> Steps[None]:
        yield Call(lambda: None, go_on.wait)
        done.set()

    caller = asyncio.create_task(arun(steps()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    assert await asyncio.to_thread(done.wait, 30)


def test_a_loop_that_ends_in_the_middle_closes_the_steps() -> None:
    started, closed = threading.Event(), threading.Event()

    def steps() -> Steps[None]:
        started.set()
        try:
            yield Call(lambda: None, asyncio.Event().wait)
        finally:
            closed.set()

    async def main() -> None:
        caller = asyncio.create_task(arun(steps()))
        assert await asyncio.to_thread(started.wait, 30)
        assert not caller.done()

    asyncio.run(main())
    assert closed.wait(30)


# ---------------------------------------------------------------- locks


def test_a_lock_excludes_threads_and_ends_with_its_block_or_its_object(tmp_path: Path) -> None:
    locks = ThreadLocks(tmp_path)
    with locks.acquire(["1"]):
        assert locks.try_acquire(["1"]) is None
        assert ThreadLocks(tmp_path).try_acquire(["1", "2"]) is None
    taken = locks.try_acquire(["1", "1", "2"])
    assert taken is not None
    taken.release()
    taken.release()
    lost = locks.try_acquire(["1"])
    assert lost is not None
    del lost
    gc.collect()
    assert locks.try_acquire(["1"]) is not None


def test_those_who_need_two_threads_do_not_wait_for_each_other(tmp_path: Path) -> None:
    locks = ThreadLocks(tmp_path)
    names = [f"thread {number}" for number in range(200)]
    inside = 0

    def work(number: int) -> None:
        nonlocal inside
        with locks.acquire([names[0], names[number], names[-number]]):
            inside += 1
            assert inside == 1
            inside -= 1

    with ThreadPoolExecutor(8) as workers:
        for done in [workers.submit(work, number) for number in range(1, 200)]:
            done.result()
    assert len(list(tmp_path.iterdir())) <= 64


# ---------------------------------------------------------------- the manifest


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Sidecar]:
    opened = Sidecar(tmp_path / "manifest.sqlite", clock=lambda: 100.0)
    yield opened
    opened.close()


def row(name: str, parent: str | None = None, *, has_chat: bool = False, names: tuple[str, ...] = ()) -> RecipeRow:
    return RecipeRow(name, "space", parent, 3, has_chat, "json", name.encode(), names or (f"block of {name}", "shared"))


def slot(thread_id: str = "1", checkpoint_id: str = "c", task: str = "") -> Slot:
    return Slot(Key(thread_id, "", checkpoint_id), task)


def needs(*names: str) -> list[Reference]:
    return [Reference(name, "space") for name in names]


def test_a_recipe_stays_while_a_reference_or_a_child_needs_it_and_its_names_while_a_recipe_has_them(
    sidecar: Sidecar,
) -> None:
    assert sidecar.note(slot("1"), needs("child"), [row("root"), row("child", "root")], ["child"])
    assert sidecar.note(slot("2"), needs("root"), [], ["root"])
    assert sidecar.drop_thread("2") == {}
    assert sidecar.has_recipe("root")
    assert sidecar.note(slot("2"), needs("root"), [], ["root"])
    assert sidecar.drop_thread("1") == {"space": ["block of child"]}
    assert sidecar.needs(["shared"])
    assert sidecar.drop_thread("2") == {"space": ["block of root", "shared"]}
    assert not sidecar.needs(["shared", "block of root"])
    assert sidecar.counts().num_recipes == sidecar.counts().num_names == 0


def test_a_note_that_lacks_a_parent_changes_nothing(sidecar: Sidecar) -> None:
    assert not sidecar.note(slot(), needs("child"), [row("child", "root")], ["child"])
    assert not sidecar.note(slot(), needs("gone"), [], ["gone"])
    counts = sidecar.counts()
    assert (counts.num_recipes, counts.num_references, counts.num_names) == (0, 0, 0)


def test_a_recipe_with_chat_structure_replaces_one_without_and_not_the_other_way_round(sidecar: Sidecar) -> None:
    assert sidecar.note(slot(), needs("a"), [row("a", has_chat=False)], ["a"])
    assert not sidecar.has_recipe("a", with_chat=True)
    better = RecipeRow("a", "space", None, 3, True, "json", b"better", ())
    assert sidecar.note(slot(), needs("a"), [better], ["a"])
    assert sidecar.note(slot(), needs("a"), [row("a")], ["a"])
    assert sidecar.recipe("a") == ("json", b"better")
    assert sidecar.counts().num_references == 1


def test_tombstones_are_forgotten_when_nothing_can_be_late_any_more(sidecar: Sidecar) -> None:
    assert sidecar.generation("1") is None
    sidecar.bury("1")
    sidecar.bury("1")
    assert sidecar.generation("1") == 2
    assert sidecar.drop_tombstones(99.0) == 0
    assert sidecar.drop_tombstones(100.0) == 1
    assert sidecar.generation("1") is None


def test_what_needs_a_look_after_a_crash_is_what_nobody_confirmed(sidecar: Sidecar) -> None:
    sidecar.note(slot(checkpoint_id="a"), needs("x"), [row("x")], [])
    sidecar.note(slot(checkpoint_id="b"), needs("x"), [], [])
    sidecar.confirm([slot(checkpoint_id="a")])
    assert sidecar.open_slots("1", before_s=99.0) == []
    assert sidecar.open_slots("1", before_s=100.0) == [slot(checkpoint_id="b")]
    sidecar.doubt("1")
    assert sidecar.open_slots("1", before_s=0.0) == [slot(checkpoint_id="a")]


def test_many_names_are_asked_for_at_once(sidecar: Sidecar) -> None:
    sidecar.note(slot(), needs("x"), [row("x", names=("needle",))], [])
    assert sidecar.needs([f"{number}" for number in range(5000)] + ["needle"])
    assert not sidecar.needs([f"{number}" for number in range(5000)])
    assert not sidecar.needs([])


def test_a_closed_manifest_says_so_and_a_locked_one_is_a_typed_error(
    sidecar: Sidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Sidecar(sidecar.path)
    other._db.execute("PRAGMA busy_timeout = 1")
    sidecar._db.execute("BEGIN IMMEDIATE")
    with pytest.raises(PersistenceError, match="locked"):
        other.bury("1")
    sidecar._db.execute("ROLLBACK")
    other.bury("1")
    other.close()
    with pytest.raises(ConfigError, match="closed"):
        other.bury("1")


def test_processes_that_make_a_manifest_at_the_same_moment_make_one(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def open_one() -> Sidecar:
        together.wait()
        return Sidecar(tmp_path / "manifest.sqlite")

    with ThreadPoolExecutor(8) as workers:
        opened = [done.result() for done in [workers.submit(open_one) for _ in range(8)]]
    opened[0].bury("1")
    assert all(one.generation("1") == 1 for one in opened)
    for one in opened:
        one.close()


# ---------------------------------------------------------------- waiting, the inner saver


def test_what_never_gets_its_parent_is_bounded() -> None:
    waiting = Waiting()

    def operation() -> Steps[None]:
        yield answered(None)

    for number in range(_MAX_WAITING + 5):
        waiting.add(Key("1", "", str(number)), None, operation)
    assert waiting.take(Key("1", "", "0")) == []
    assert waiting.take(Key("1", "", "5")) == [operation]
    assert waiting.take(Key("1", "", "5")) == []
    waiting.drop_thread("1")
    assert waiting.take(Key("1", "", "6")) == []


def test_capabilities_are_seen_on_the_type_of_the_inner_saver() -> None:
    inner = Inner(InMemorySaver())
    assert inner.has("put")
    assert not inner.has("prune")
    assert not inner.has("copy_thread")


def test_every_method_of_the_contract_is_defined_in_both_colours_with_the_signature_of_the_base() -> None:
    names = [
        name
        for name, member in vars(BaseCheckpointSaver).items()
        if inspect.isfunction(member) and not name.startswith("_") and name not in ("get", "aget")
    ]
    assert len(names) >= 18
    for name in names:
        ours: Callable[..., Any] = vars(KVCheckpointSaver)[name]
        theirs = getattr(BaseCheckpointSaver, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name
