"""Steps that come together run together, and none harms another."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from aaflow_langgraph.engine.batch import BUDGET_ROWS, Batcher, Step


class Model:
    """A forward whose answer is the sum of the tokens; stops at a gate so that others can queue up."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.ran: list[list[int]] = []

    def __call__(self, steps: Sequence[Step]) -> list[torch.Tensor]:
        self.entered.set()
        assert self.gate.wait(20)
        self.ran.append([step.position for step in steps])
        if any(-1 in step.token_ids for step in steps):
            raise ValueError("a token that is none")
        return [torch.tensor(float(sum(step.token_ids))) for step in steps]


def step(position: int, *token_ids: int) -> Step:
    unused: Any = None
    return Step(token_ids, position, unused, unused)


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


def run_all(batcher: Batcher, model: Model, steps: list[Step]) -> list[float | str]:
    """The first step is in the model while all others queue up, in order; then the gate opens."""
    answers: list[float | str] = ["nothing"] * len(steps)

    def one(number: int) -> None:
        try:
            answers[number] = float(batcher.step(steps[number]))
        except ValueError as error:
            answers[number] = str(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(steps))]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 0:
            assert model.entered.wait(20)
        else:
            until(lambda n=number: len(batcher._queue) == n)  # type: ignore[misc]
    model.gate.set()
    for thread in threads:
        thread.join(20)
    return answers


def test_a_step_alone_runs_at_once(batcher: Batcher, model: Model) -> None:
    model.gate.set()
    assert float(batcher.step(step(0, 3, 4))) == 7
    assert (batcher.num_steps, batcher.num_forwards) == (1, 1)


def test_those_who_wait_share_the_next_forward(batcher: Batcher, model: Model) -> None:
    assert run_all(batcher, model, [step(n, n, 10) for n in range(6)]) == [10, 11, 12, 13, 14, 15]
    assert model.ran == [[0], [1, 2, 3, 4, 5]]
    assert (batcher.num_steps, batcher.num_forwards, batcher.num_repeated) == (6, 2, 0)


def test_first_come_first_served_within_the_budget(batcher: Batcher, model: Model) -> None:
    rows = [1, BUDGET_ROWS // 2, BUDGET_ROWS // 2, 1, BUDGET_ROWS]
    run_all(batcher, model, [step(n, *[1] * count) for n, count in enumerate(rows)])
    assert model.ran == [[0], [1, 2], [3], [4]]


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
    assert not batcher._is_busy


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
    assert not batcher._queue
    assert not batcher._is_busy
    assert batcher.num_steps == 600
