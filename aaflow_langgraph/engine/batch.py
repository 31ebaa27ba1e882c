"""Requests that want a forward at the same moment share one: weights and shared extents are read once for all of them.

No thread of its own: whoever comes while nobody computes computes for everybody who waits, and hands on (flat combining,
Hendler et al., SPAA 2010). Requests join and leave between steps; first come, first served. A forward that fails is repeated
request by request, so that one bad request never harms its neighbours.

Knows steps and how to run them; knows no broker, no sampler, no stream.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aaflow_langgraph.engine.attention import Past

MOST_ROWS = 64
"""A step with more new tokens runs alone: its products are large enough, and those who decode wait for one such chunk at
most."""

BUDGET_ROWS = 256
"""New tokens of one shared forward, all requests together."""

_WAIT_SHARE, _LONGEST_WAIT_S = 0.2, 0.02


@dataclass(eq=False, slots=True)
class Step:
    """One request's part of a forward: ``token_ids`` from ``position`` on (or at the positions ``[T]``) over ``past``.
    ``cache`` is the run's, for forwards through the model's own modules.
    """

    token_ids: Sequence[int]
    position: int | torch.Tensor
    past: Past
    cache: Any
    done: threading.Event = field(default_factory=threading.Event)
    logits: torch.Tensor | None = None
    error: BaseException | None = None
    leads: bool = False


class Batcher:
    """Runs steps, together where they come together. Thread-safe.

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
        self._run = run
        self._engine_lock = lock
        self._clock = clock
        self._lock = threading.Lock()
        self._arrived = threading.Condition(self._lock)
        self._queue: deque[Step] = deque()
        self._is_busy = False
        self._last_size = 1
        self._last_s = 0.0

    def step(self, mine: Step) -> torch.Tensor:
        """Run one step; logits ``[vocab]`` after its last token. What its forward raises is raised here."""
        with self._lock:
            self._queue.append(mine)
            mine.leads = not self._is_busy
            self._is_busy = True
            self._arrived.notify()
        if not mine.leads:
            mine.done.wait()
        if mine.leads:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        if mine.logits is None:
            raise RuntimeError("a step ended without logits")
        return mine.logits

    def _lead(self, mine: Step) -> None:
        """Compute for everybody who waits, ``mine`` among them, then hand on."""
        mine.done.clear()
        try:
            while not mine.done.is_set():
                self._forward(self._gather())
        finally:
            with self._lock:
                successor = self._queue[0] if self._queue else None
                self._is_busy = successor is not None
                if successor is not None:
                    successor.leads = True
            if successor is not None:
                successor.done.set()

    def _gather(self) -> list[Step]:
        """The next steps, in order of arrival, within the budget.

        Those who shared the last forward sample their tokens now and come back within a moment; waiting a part of a step for
        them halves the number of forwards.
        """
        with self._lock:
            deadline = self._clock() + min(_WAIT_SHARE * self._last_s, _LONGEST_WAIT_S)
            while len(self._queue) < self._last_size and (left := deadline - self._clock()) > 0:
                self._arrived.wait(left)
            taken = [self._queue.popleft()]
            rows = len(taken[0].token_ids)
            while self._queue and rows + len(self._queue[0].token_ids) <= BUDGET_ROWS:
                taken.append(self._queue.popleft())
                rows += len(taken[-1].token_ids)
            return taken

    def _forward(self, steps: list[Step]) -> None:
        started = self._clock()
        try:
            with self._engine_lock:
                for step, logits in zip(steps, self._run(steps), strict=True):
                    step.logits = logits
        except Exception as error:  # whatever it is, it belongs to one of them
            self.num_repeated += len(steps) > 1
            for step in steps:
                self._alone(step, error if len(steps) == 1 else None)
        with self._lock:
            self._last_size, self._last_s = len(steps), self._clock() - started
            self.num_steps += len(steps)
            self.num_forwards += 1
        for step in steps:
            step.done.set()

    def _alone(self, step: Step, error: Exception | None) -> None:
        """Find out whose fault it was."""
        if error is None:
            try:
                with self._engine_lock:
                    step.logits = self._run([step])[0]
                return
            except Exception as own:
                error = own
        step.error = error
