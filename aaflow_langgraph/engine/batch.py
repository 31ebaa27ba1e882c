"""Whatever is computed with a model waits in one line; requests whose turn it is share a forward, in which weights and
shared extents are read once for all of them.

No thread of its own: whoever comes while nobody computes computes for everybody who waits, and hands on (flat combining,
Hendler et al., SPAA 2010). Requests join and leave between forwards, first come, first served inside a priority. Two kinds of
work stand in the line:

* *steps* of requests that may share a forward. Those of a few tokens (streams) go first and whole; longer ones (prefills)
  fill what they leave of the budget, cut where it ends, so that a stream waits for a small part of a prefill at most;
* *calls* that must run alone: canonical chunks, whose bits must not depend on neighbours, and models without shared forwards.
  Between two of them those who wait to share a forward have one.

A forward that fails is repeated request by request, so that one bad request never harms its neighbours.

Knows steps and how to run them; knows no broker, no sampler, no stream.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from aaflow_langgraph.engine.attention import Past
from aaflow_langgraph.engine.line import Waiting, leave
from aaflow_langgraph.errors import ConfigError

Result = TypeVar("Result")

SHORT_ROWS = 64
"""A step of at most so many new tokens is not cut."""

BUDGET_ROWS = 256
"""New tokens of one shared forward, all requests together."""

MIXED_ROWS = 128
"""The same where short and long steps meet. Smaller: streams wait less; larger: prefills waste less."""

_WAIT_SHARE, _LONGEST_WAIT_S = 0.2, 0.02


@dataclass(eq=False, slots=True)
class Step:
    """One request's part of a forward: ``token_ids`` from ``position`` on (or at the positions ``[T]``) over ``past``.
    ``cache`` is the run's, for forwards through the model's own modules. ``num_together`` requests were in its last forward.
    """

    token_ids: Sequence[int]
    position: int | torch.Tensor
    past: Past
    cache: Any
    num_together: int = 1


@dataclass(eq=False, slots=True)
class _Work(Waiting):
    """A place in the line: a step, or a call that runs alone."""

    step: Step | None = None
    call: Callable[[], Any] | None = None
    arrived_s: float = 0.0
    num_run: int = 0
    result: Any = None
    error: BaseException | None = None
    is_finished: bool = False
    wake: threading.Event = field(default_factory=threading.Event)

    @property
    def num_left(self) -> int:
        """Tokens of a step that were not run yet."""
        return 0 if self.step is None else len(self.step.token_ids) - self.num_run

    @property
    def is_long(self) -> bool:
        """May it be cut?"""
        return self.num_left > SHORT_ROWS

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """Let the caller go on."""
        self.result, self.error, self.is_finished = result, error, True
        self.wake.set()


@dataclass(frozen=True, slots=True)
class _Part:
    """The next ``count`` tokens of a step, or a whole call (``count`` 0)."""

    work: _Work
    count: int

    def step(self) -> Step:
        """As a step of its own."""
        whole, at = self.work.step, self.work.num_run
        if whole is None:
            raise RuntimeError("a call has no step")
        if self.count == len(whole.token_ids):
            return whole
        return Step(whole.token_ids[at : at + self.count], whole.position + at, whole.past, whole.cache)


class Batcher:
    """Runs steps, together where they come together, and calls, alone. Thread-safe.

    Args:
        run: One forward over some steps; logits ``[vocab]`` of each, in order.
        lock: Held while anything is computed with the model.
        clock: Seconds.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Step]], list[torch.Tensor]],
        lock: threading.Lock,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.num_steps = 0
        self.num_forwards = 0
        self.num_repeated = 0
        self.longest_stall_s = 0.0
        """Longest that a step of one token, a stream's, stood in the line before its forward began."""
        self._pid = os.getpid()
        self._run = run
        self._engine_lock = lock
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._line: list[_Work] = []
        self._parts: list[_Part] = []
        """What is being computed, by whoever leads."""
        self._num_arrived = 0
        self._leader: _Work | None = None
        """Whose thread computes now, or is about to."""
        self._was_alone = False
        self._last_size = 1
        self._last_s = 0.0

    @property
    def progress(self) -> int | None:
        """A number that grows with everything that is computed; None while something is."""
        with self._lock:
            return None if self.is_busy else self._num_arrived

    @property
    def is_busy(self) -> bool:
        """Is anything computed, or about to be?"""
        return self._leader is not None

    def step(self, step: Step, priority: int = 0) -> torch.Tensor:
        """Run a step; logits ``[vocab]`` after its last token. What its forward raises is raised here.

        Its keys and values are in the tail behind ``length``, which is the caller's to advance.
        """
        length = step.past.tail.length
        work = _Work(priority, 0, step=step)
        try:
            logits: torch.Tensor = self._wait(work)
        finally:
            if work.num_run:  # it was cut: its parts are each other's past
                step.past.tail.length = length
        return logits

    def alone(self, call: Callable[[], Result], priority: int = 0) -> Result:
        """Run ``call`` in its turn, while nothing else is computed with the model; what it raises is raised here.

        It runs in any thread, and once more from its beginning when that thread is interrupted.
        """
        result: Result = self._wait(_Work(priority, 0, call=call))
        return result

    def _wait(self, mine: _Work) -> Any:
        if os.getpid() != self._pid:  # who computes for all, and the lock, may be another process's for ever
            raise ConfigError(
                f"this engine belongs to process {self._pid}, this is its forked child {os.getpid()}: the threads of torch do "
                "not survive a fork; start worker processes with 'spawn' and load the model in each"
            )
        try:
            self._arrive(mine)
            if self._leader is not mine:
                mine.wake.wait()
            while self._leader is mine and not mine.is_finished:
                self._forward()
        finally:
            try:
                self._leave(mine)
            except BaseException:  # interrupted on its way out: whoever waits behind it must not wait for ever
                self._leave(mine)
                raise
        if mine.error is not None:
            raise mine.error
        return mine.result

    def _arrive(self, mine: _Work) -> None:
        with self._lock:
            mine.ticket, mine.arrived_s = self._num_arrived, self._clock()
            self._num_arrived += 1
            self._line.append(mine)
            self._leader = self._leader or mine
            self._arrived.notify()

    def _leave(self, mine: _Work) -> None:
        """The caller goes: it has what it came for, or was interrupted; who led lets the next one lead. Idempotent.

        What has not begun never will. What others run of it writes into the caller's tail, so that is waited for.
        """
        while True:
            with self._lock:
                if self._leader is mine:
                    self._put_back()
                if mine in self._line:  # also after it was cut
                    self._line.remove(mine)
                if mine.is_finished or all(part.work is not mine for part in self._parts):
                    if self._leader is mine:
                        self._leader = min(self._line, key=_turn, default=None)
                    if self._leader is not None:
                        self._leader.wake.set()
                    return
            mine.wake.wait()

    def _put_back(self) -> None:
        """Whoever is not finished, cut or interrupted, goes back to the same place. Called with the lock held."""
        works = [part.work for part in self._parts]
        self._line += [work for work in works if not work.is_finished and work not in self._line]
        self._parts = []

    def _forward(self) -> None:
        """Compute once, for whose turn it is."""
        try:
            parts = self._gather()
            started = self._clock()
            streams = [part.work for part in parts if part.count == 1]
            self.longest_stall_s = max([self.longest_stall_s, *(started - work.arrived_s for work in streams)])
            self._was_alone = parts[0].work.call is not None
            if len(parts) > 1:
                self._together(parts)
            else:
                self._one(parts[0])
            if not self._was_alone:
                self._last_size, self._last_s = len(parts), self._clock() - started
                self.num_steps += len(parts)
                self.num_forwards += 1
        finally:
            with self._lock:
                self._put_back()

    def _gather(self) -> list[_Part]:
        """Take the next call, or the next steps within the budget, out of the line."""
        with self._lock:
            # Those who shared the last forward sample their tokens now and come back within a moment; waiting a part of a
            # step for them halves the number of forwards.
            deadline = self._clock() + min(_WAIT_SHARE * self._last_s, _LONGEST_WAIT_S)
            while len(self._line) < self._last_size and (left := deadline - self._clock()) > 0:
                self._arrived.wait(left)
            first = min(self._line, key=_turn)
            steps = [work for work in self._line if work.step is not None]
            if first.call is not None and not (self._was_alone and any(w.priority <= first.priority for w in steps)):
                parts = [_Part(first, 0)]
            else:
                parts = _fill(sorted(steps, key=_turn))
            self._parts = parts
            leave(self._line, [part.work for part in parts])
            return parts

    def _together(self, parts: Sequence[_Part]) -> None:
        try:
            with self._engine_lock:
                logits = self._run([part.step() for part in parts])
        except Exception:  # whatever it is, it belongs to one of them: find out to whom
            self.num_repeated += 1
            for part in parts:
                self._one(part)
            return
        for part, result in zip(parts, logits, strict=True):
            if part.work.step is not None:
                part.work.step.num_together = len(parts)
            _advance(part, result)

    def _one(self, part: _Part) -> None:
        work = part.work
        try:
            with self._engine_lock:
                if work.call is not None:
                    work.finish(work.call())
                else:
                    _advance(part, self._run([part.step()])[0])
        except Exception as error:
            work.finish(error=error)


def _turn(work: _Work) -> tuple[bool, int, int]:
    return work.turn


def _fill(steps: Sequence[_Work]) -> list[_Part]:
    """What shares the next forward, of steps in the order of their turns: short ones whole, long ones in what they leave."""
    short = [work for work in steps if not work.is_long]
    budget = MIXED_ROWS if 0 < len(short) < len(steps) else BUDGET_ROWS
    parts: list[_Part] = []
    # Stable: turns decide inside both kinds; the kind decides only among those of one priority who still have patience.
    for work in sorted(steps, key=lambda work: (work.turn[:2], work.is_long)):
        count = min(work.num_left, budget)
        if count < work.num_left and not work.is_long:
            break
        if count == 0:
            break
        parts.append(_Part(work, count))
        budget -= count
    return parts


def _advance(part: _Part, logits: torch.Tensor) -> None:
    """A part of a step was run; ``logits`` are those after it."""
    work = part.work
    if part.count == work.num_left or work.step is None:
        work.finish(logits)
        return
    work.step.past.tail.length += part.count
    work.num_run += part.count
    work.num_passed = 0
