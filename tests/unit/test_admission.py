"""Who may run, who waits, in which order, and when a rule about memory gives way."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from aaflow_langgraph import admission
from aaflow_langgraph.admission import STANDSTILL_S, Admission
from aaflow_langgraph.engine.line import PATIENCE, Waiting, leave


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Visitor(threading.Thread):
    """Is admitted, says so, stays until told to go."""

    def __init__(
        self, door: Admission, name: str, order: list[str], priority: int = 0, tick: Callable[[], None] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._door, self._order, self._priority = door, order, priority
        self._tick = tick or (lambda: None)
        self.go, self.inside = threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._door.admitted(self._priority, self._tick):
                self._order.append(self.name)
                self.inside.set()
                assert self.go.wait(20)
        except BaseException as error:
            self.error = error

    def leaves(self) -> None:
        self.go.set()
        self.join(20)
        assert not self.is_alive()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(20_000):
        if condition():
            return
        threading.Event().wait(0.001)
    pytest.fail("waited in vain")


def come(door: Admission, order: list[str], *names: str, priority: int = 0) -> list[Visitor]:
    """Visitors who arrive one after the other."""
    visitors = []
    for name in names:
        before = door.num_waiting
        visitor = Visitor(door, name, order, priority)
        visitor.start()
        until(lambda v=visitor, n=before: v.inside.is_set() or door.num_waiting > n)  # type: ignore[misc]
        visitors.append(visitor)
    return visitors


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "POLL_S", 0.002)


@pytest.fixture
def order() -> list[str]:
    return []


def busy() -> None:
    """Something is computed all the time."""
    return None


def test_so_many_run_and_the_others_come_in_their_order(order: list[str]) -> None:
    door = Admission(busy, most=2)
    visitors = come(door, order, "a", "b", "c", "d", "e")
    assert (door.num_running, door.num_waiting) == (2, 3)
    for visitor in visitors:
        assert visitor.inside.wait(20)
        visitor.leaves()
    assert order == ["a", "b", "c", "d", "e"]
    assert (door.num_running, door.num_waiting) == (0, 0)


def test_a_smaller_priority_goes_first_and_equal_ones_as_they_came(order: list[str]) -> None:
    door = Admission(busy, most=1)
    first = come(door, order, "first")
    late = come(door, order, "late 1", "late 2", priority=5)
    normal = come(door, order, "normal 1", "normal 2")
    urgent = come(door, order, "urgent", priority=-1)
    for visitor in (*first, *urgent, *normal, *late):
        assert visitor.inside.wait(20)
        visitor.leaves()
    assert order == ["first", "urgent", "normal 1", "normal 2", "late 1", "late 2"]


def test_whoever_was_passed_by_often_enough_goes_in_front_of_every_priority() -> None:
    patient = Waiting(9, 0)
    line = [patient]
    for ticket in range(1, PATIENCE + 1):
        line.append(Waiting(0, ticket))
        first = min(line, key=lambda place: place.turn)
        assert first is not patient
        leave(line, [first])
    line.append(Waiting(-100, PATIENCE + 1))
    assert min(line, key=lambda place: place.turn) is patient


def test_those_out_of_patience_go_as_they_came_whatever_their_priority() -> None:
    line = [Waiting(9, 0, PATIENCE), Waiting(1, 1, PATIENCE), Waiting(-5, 2)]
    assert [place.ticket for place in sorted(line, key=lambda place: place.turn)] == [0, 1, 2]


def test_taking_those_who_came_first_passes_nobody_by() -> None:
    line = [Waiting(0, ticket) for ticket in range(4)]
    leave(line, line[:2])
    assert [(place.ticket, place.num_passed) for place in line] == [(2, 0), (3, 0)]
    leave(line, line[1:])
    assert [(place.ticket, place.num_passed) for place in line] == [(2, 1)]


def test_a_tick_that_raises_leaves_the_line_as_it_was(order: list[str]) -> None:
    door = Admission(busy, most=1)
    (first,) = come(door, order, "first")
    give_up = threading.Event()

    def tick() -> None:
        if give_up.is_set():
            raise KeyError("gives up")

    quitter = Visitor(door, "quitter", order, tick=tick)
    quitter.start()
    until(lambda: door.num_waiting == 1)
    (third,) = come(door, order, "third")
    give_up.set()
    quitter.join(20)
    assert isinstance(quitter.error, KeyError)
    assert (door.num_running, door.num_waiting) == (1, 1)
    first.leaves()
    assert third.inside.wait(20)
    third.leaves()
    assert order == ["first", "third"]
    assert (door.num_running, door.num_waiting) == (0, 0)


def test_who_gave_up_while_it_waited_does_not_run_though_its_turn_came(order: list[str]) -> None:
    """The tick is asked once more behind the wait: between two looks a turn may have come and the reason gone."""
    door = Admission(busy, most=1)
    (first,) = come(door, order, "first")

    def tick() -> None:
        if first.go.is_set():
            raise KeyError("gives up")

    admission.POLL_S = 20.0  # the fixture puts it back; this one does not look before its turn
    late = Visitor(door, "late", order, tick=tick)
    late.start()
    until(lambda: door.num_waiting == 1)
    first.leaves()
    late.join(20)
    assert isinstance(late.error, KeyError)
    assert order == ["first"]
    assert (door.num_running, door.num_waiting) == (0, 0)


def test_a_block_that_raises_gives_its_place_to_the_next(order: list[str]) -> None:
    door = Admission(busy, most=1)
    came: list[Visitor] = []

    def interrupted() -> None:
        with door.admitted(0, lambda: None):
            came.extend(come(door, order, "next"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    (next_one,) = came
    assert next_one.inside.wait(20)
    next_one.leaves()
    assert (door.num_running, door.num_waiting) == (0, 0)


def test_a_request_inside_of_another_of_its_thread_never_waits(order: list[str]) -> None:
    door = Admission(busy, most=1)
    with door.admitted(0, lambda: None):
        (other,) = come(door, order, "other")
        with door.admitted(7, lambda: None):
            assert (door.num_running, door.num_waiting) == (2, 1)
        assert not other.inside.is_set()
    assert other.inside.wait(20)
    other.leaves()


def test_when_all_stand_still_one_at_a_time_is_let_in(order: list[str]) -> None:
    clock = Clock()
    door = Admission(lambda: 7, most=1, clock=clock)
    visitors = come(door, order, "stands still", "b", "c", "d")
    seen: list[int] = []
    for expected in (2, 3):
        until(lambda: door._seen == 7)
        clock.now_s += STANDSTILL_S / 2
        pause = threading.Event()
        pause.wait(0.02)  # many looks, none of which may let anybody in
        seen.append(door.num_running)
        clock.now_s += STANDSTILL_S / 2
        until(lambda expected=expected: door.num_running == expected)  # type: ignore[misc]
        pause.wait(0.02)
        seen.append(door.num_running)
    assert seen == [1, 2, 2, 3]
    assert order == ["stands still", "b", "c"]
    for visitor in visitors:
        visitor.leaves()
    assert (door.num_running, door.num_waiting) == (0, 0)


def test_while_anything_is_computed_nobody_is_let_in_above_the_limit(order: list[str]) -> None:
    """``progress`` grows, or is None in the middle of a forward: both are no standstill, however much time passes."""
    clock = Clock()
    progress: list[int | None] = [0]
    num_looks = 0

    def look() -> int | None:
        nonlocal num_looks
        num_looks += 1
        clock.now_s += STANDSTILL_S
        if progress[0] is not None:
            progress[0] += 1
        return progress[0]

    door = Admission(look, most=1, clock=clock)
    visitors = come(door, order, "a", "b")
    until(lambda: num_looks > 5)
    progress[0] = None
    until(lambda: num_looks > 10)
    assert order == ["a"]
    for visitor in visitors:
        visitor.leaves()
