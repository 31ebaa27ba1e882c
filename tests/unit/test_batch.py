"""Steps that come together run together, calls run alone, everybody has a turn, and none harms another."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aaflow_langgraph.engine.batch import BUDGET_ROWS, MIXED_ROWS, SHORT_ROWS, Batcher, Step
from aaflow_langgraph.engine.line import PATIENCE


class Model:
    """A forward whose answer is the sum of the tokens; stops at a gate so that others can queue up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.ran: list[list[int]] = []
        self.rows: list[list[int]] = []

    def __call__(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        self.entered.set()
        assert self.gate.wait(20)
        self.ran.append([step.position for step in steps])  # type: ignore[misc]
        self.rows.append([len(step.token_ids) for step in steps])
        if any(-1 in step.token_ids for step in steps):
            raise ValueError("a token that is none")
        return [torch.tensor(float(sum(step.token_ids))) for step in steps]


def step(position: int, *token_ids: int) -> Step:
    past: Any = SimpleNamespace(tail=SimpleNamespace(length=0))
    return Step(token_ids, position, past, None)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        threading.Event().wait(0.001)
    pytest.fail("waited in vain")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def batcher(model: Model) -> Batcher:
    return Batcher(model, threading.Lock())


Asked = Step | Callable[[], Any]


def run_all(batcher: Batcher, model: Model, asked: Sequence[Asked | tuple[Asked, int]]) -> list[Any]:
    """The first is in the model while all others queue up, in order; then the gate opens. A tuple has a priority."""
    answers: list[Any] = ["nothing"] * len(asked)

    def one(number: int) -> None:
        entry = asked[number]
        what, priority = entry if isinstance(entry, tuple) else (entry, 0)
        try:
            if isinstance(what, Step):
                answers[number] = float(batcher.step(what, priority))
            else:
                answers[number] = batcher.alone(what, priority)
        except ValueError as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(asked))]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 0:
            assert model.entered.wait(20)
        else:
            until(lambda n=number: len(batcher._line) == n)  # type: ignore[misc]
    model.gate.set()
    for thread in threads:
        thread.join(20)
    return answers


def noted(model: Model, name: int, answer: Any = None) -> Callable[[], Any]:
    """A call that runs alone."""

    def call() -> Any:
        model.ran.append([name])
        return answer

    return call


def test_a_step_alone_runs_at_once(batcher: Batcher, model: Model) -> None:
    model.gate.set()
    assert float(batcher.step(step(0, 3, 4))) == 7
    assert (batcher.num_steps, batcher.num_forwards) == (1, 1)


def test_those_who_wait_share_the_next_forward(batcher: Batcher, model: Model) -> None:
    assert run_all(batcher, model, [step(n, n, 10) for n in range(6)]) == [10, 11, 12, 13, 14, 15]
    assert model.ran == [[0], [1, 2, 3, 4, 5]]
    assert (batcher.num_steps, batcher.num_forwards, batcher.num_repeated) == (6, 2, 0)


def test_first_come_first_served_within_the_budget(batcher: Batcher, model: Model) -> None:
    short = BUDGET_ROWS // SHORT_ROWS
    run_all(batcher, model, [step(n, *[1] * SHORT_ROWS) for n in range(2 + 2 * short)])
    assert model.ran == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]


def test_a_long_step_fills_what_short_ones_leave_and_is_cut_there(batcher: Batcher, model: Model) -> None:
    """Its parts are each other's past; the tail's length is as before in the end, for the caller to advance."""
    long = step(1000, *range(300))
    answers = run_all(batcher, model, [step(0, 1), long, step(2, 5), step(3, 6)])
    assert model.ran[:2] == [[0], [2, 3, 1000]]
    assert model.rows[1] == [1, 1, MIXED_ROWS - 2]
    assert model.ran[2:] == [[1000 + MIXED_ROWS - 2]]  # alone again: all of the rest at once
    assert answers == [1, sum(range(MIXED_ROWS - 2, 300)), 5, 6]
    assert long.past.tail.length == 0


def test_long_steps_without_streams_take_the_whole_budget(batcher: Batcher, model: Model) -> None:
    run_all(batcher, model, [step(0, 1), step(1000, *[1] * 200), step(2000, *[1] * 200)])
    assert model.rows == [[1], [200, BUDGET_ROWS - 200], [400 - BUDGET_ROWS]]


def test_a_call_runs_alone_in_its_turn_and_its_error_is_its_callers(batcher: Batcher, model: Model) -> None:
    def failing() -> None:
        raise ValueError("a call that fails")

    answers = run_all(batcher, model, [step(0, 1), noted(model, 100, "done"), step(1, 2), failing, step(2, 3)])
    assert answers == [1, "done", 2, "a call that fails", 3]
    assert model.ran == [[0], [100], [1, 2]]


def test_between_two_calls_those_who_share_have_a_forward(batcher: Batcher, model: Model) -> None:
    """Many prefills that run alone stop a stream for one of them at a time, not for all."""
    calls = [noted(model, 100 + n) for n in range(3)]
    run_all(batcher, model, [step(0, 1), *calls, step(1, 2)])
    assert model.ran == [[0], [100], [1], [101], [102]]


def test_a_smaller_priority_goes_first(batcher: Batcher, model: Model) -> None:
    asked = [step(0, 1), (noted(model, 100), 1), (step(1, 1), 2), (noted(model, 101), -1), (noted(model, 102), 1)]
    run_all(batcher, model, asked)
    assert model.ran == [[0], [101], [100], [102], [1]]


def test_nobody_is_passed_by_for_ever(batcher: Batcher, model: Model) -> None:
    """Behind ever new ones of a better priority the turn comes after so many of them."""
    model.gate.set()
    order: list[str] = []
    begun = threading.Event()

    def better(left: int) -> None:
        order.append("better")
        if left:
            threading.Thread(target=lambda: batcher.alone(lambda: better(left - 1), 0)).start()
            until(lambda: any(work.priority == 0 for work in batcher._line))
        if left == 3 * PATIENCE:
            begun.set()
            until(lambda: any(work.priority == 9 for work in batcher._line))

    first = threading.Thread(target=lambda: batcher.alone(lambda: better(3 * PATIENCE), 0))
    first.start()
    assert begun.wait(20)
    batcher.alone(lambda: order.append("patient"), 9)
    first.join(20)
    until(lambda: not batcher.is_busy)
    assert order.index("patient") == 2 + PATIENCE  # two stood there before it


def test_a_bad_request_harms_no_neighbour(batcher: Batcher, model: Model) -> None:
    answers = run_all(batcher, model, [step(0, 1), step(1, 2), step(2, -1), step(3, 4)])
    assert answers == [1, 2, "a token that is none", 4]
    assert model.ran == [[0], [1, 2, 3], [1], [2], [3]]
    assert batcher.num_repeated == 1


def test_after_a_failure_everything_goes_on(batcher: Batcher, model: Model) -> None:
    model.gate.set()
    with pytest.raises(ValueError, match="a token that is none"):
        batcher.step(step(0, -1))
    assert float(batcher.step(step(1, 5))) == 5
    assert not batcher.is_busy


class Interrupt(BaseException):
    """As a KeyboardInterrupt, for one thread."""


def interrupt(thread: threading.Thread) -> None:
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupt))


def test_who_computes_for_others_may_be_interrupted(batcher: Batcher) -> None:
    """The others are computed for by the next one; what was interrupted is repeated for them."""
    entered, attempts = threading.Event(), []
    answers: dict[str, Any] = {}

    def leader() -> None:
        try:
            batcher.alone(lambda: spin(entered))
        except Interrupt:
            answers["leader"] = "interrupted"

    def spin(flag: threading.Event) -> None:
        attempts.append(1)
        flag.set()
        while len(attempts) == 1:  # bytecode, in which an interrupt arrives
            pass

    thread = threading.Thread(target=leader)
    thread.start()
    assert entered.wait(20)
    other = threading.Thread(target=lambda: answers.update(other=batcher.alone(lambda: "computed")))
    other.start()
    until(lambda: len(batcher._line) == 1)
    interrupt(thread)
    thread.join(20)
    other.join(20)
    assert answers == {"leader": "interrupted", "other": "computed"}
    assert not batcher.is_busy
    assert not batcher._line


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt, also where tests run in a process that ignores it."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("signals go to the main thread")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_who_waits_may_be_interrupted_and_is_withdrawn(batcher: Batcher, model: Model) -> None:
    other = threading.Thread(target=lambda: batcher.step(step(0, 1)))
    other.start()
    assert model.entered.wait(20)

    def press() -> None:
        until(lambda: len(batcher._line) == 1)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    presser = threading.Thread(target=press)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        batcher.step(step(1, 2))
    presser.join(20)
    model.gate.set()
    other.join(20)
    assert model.ran == [[0]]
    assert not batcher.is_busy
    assert float(batcher.step(step(2, 3))) == 3


def test_a_long_step_that_is_interrupted_while_others_run_a_part_of_it_hands_the_lead_on(
    batcher: Batcher, model: Model
) -> None:
    """What is left of it goes back into the line and out of it with its caller: nobody is to wait for a leader that left."""
    begun, seen = threading.Semaphore(0), threading.Semaphore(0)
    parts: list[list[int]] = []

    def run(steps: Sequence[Step]) -> list[torch.Tensor]:
        begun.release()
        assert seen.acquire(timeout=20)
        parts.append([len(step.token_ids) for step in steps])
        return [torch.tensor(0.0) for _ in steps]

    batcher._run = run
    outcome: list[str] = []

    def long() -> None:
        try:
            batcher.step(step(1000, *[1] * 300))
        except Interrupt:
            outcome.append("interrupted")

    first = threading.Thread(target=lambda: batcher.step(step(0, 1)))
    first.start()
    assert begun.acquire(timeout=20)
    second = threading.Thread(target=lambda: batcher.step(step(1, 1)))
    second.start()
    until(lambda: len(batcher._line) == 1)
    interrupted = threading.Thread(target=long)
    interrupted.start()
    until(lambda: len(batcher._line) == 2)
    third = threading.Thread(target=lambda: outcome.append(str(float(batcher.step(step(2, *[1] * 200))))))
    third.start()
    until(lambda: len(batcher._line) == 3)
    seen.release()
    assert begun.acquire(timeout=20)  # the second leads and runs a part of the long one
    withdrawn = threading.Event()
    inner = batcher._leave

    def withdraw(work: Any) -> None:
        withdrawn.set()
        inner(work)

    batcher._leave = withdraw  # type: ignore[method-assign]
    interrupt(interrupted)
    # A thread that waits for a lock sees it when it is woken; so does one that computes.
    work = next(part.work for part in batcher._parts if part.work.num_left == 300)
    work.wake.set()
    assert withdrawn.wait(20)
    work.wake.clear()
    for _ in range(8):
        seen.release()
    for thread in (first, second, interrupted, third):
        thread.join(20)
        assert not thread.is_alive()
    assert sorted(outcome) == ["0.0", "interrupted"]
    assert not batcher.is_busy
    assert not batcher._line
    assert parts[1] == [1, MIXED_ROWS - 1]


def test_nobody_leads_for_ever(batcher: Batcher, model: Model) -> None:
    """A hundred threads that come again and again: all are served, and nothing is left behind."""
    model.gate.set()
    served: list[float] = []

    def one(number: int) -> None:
        for turn in range(20):
            served.append(float(batcher.step(step(turn, number, turn))))

    threads = [threading.Thread(target=one, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(served) == sorted(float(number + turn) for number in range(30) for turn in range(20))
    assert not batcher._line
    assert not batcher.is_busy
    assert batcher.num_steps == 600
