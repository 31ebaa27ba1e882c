"""Random lives of threads: after every step the manifest refers to the handles that the inner saver holds, after a sweep to no
others, and it has exactly the recipes that those stand on. The oracle is the inner saver itself, read by LangGraph's own ``list``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.memory import InMemorySaver

from aaflow_langgraph import KVBroker, KVCheckpointSaver, KVHandle
from aaflow_langgraph.checkpoint.find import find_handles
from tests.savers import put, query

THREADS = st.sampled_from(["a", "b", "c"])
RUNS = st.sampled_from(["run 1", "run 2"])


class Crash(Exception):
    """The process dies here."""


class Crashing(InMemorySaver):
    """Stops before or after it stores, when told to."""

    crash: str = ""

    def put(self, *args: Any) -> RunnableConfig:
        if self.crash == "before":
            raise Crash
        stored = super().put(*args)
        if self.crash == "after":
            raise Crash
        return stored

    def put_writes(self, *args: Any, **options: Any) -> None:
        if self.crash == "before":
            raise Crash
        super().put_writes(*args, **options)
        if self.crash == "after":
            raise Crash

    def delete_thread(self, thread_id: str) -> None:
        if self.crash == "before":
            raise Crash
        super().delete_thread(thread_id)
        if self.crash == "after":
            raise Crash


class Lives(RuleBasedStateMachine):
    broker: KVBroker

    def __init__(self) -> None:
        super().__init__()
        self.inner = Crashing()
        self.handles: list[KVHandle] = []
        self.stored: list[tuple[str, RunnableConfig]] = []

    @initialize(durability=st.sampled_from(["sync", "evict", "recipe"]))
    def open(self, durability: Any) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.durability = durability
        self.saver = KVCheckpointSaver(self.inner, self.broker, durability=durability, directory=self.folder.name)
        self.handles = [self.broker.materialize([9, 8, 7])]

    @rule(number=st.integers(0, 9), parent=st.integers(0, 100))
    def make(self, number: int, parent: int) -> None:
        self.handles.append(self.broker.append(self.handles[parent % len(self.handles)], [20 + number]))

    @rule(name=THREADS, at=st.integers(0, 100), has_parent=st.booleans(), ns=st.sampled_from(["", "child:1"]), run=RUNS)
    def put(self, name: str, at: int, has_parent: bool, ns: str, run: str) -> None:
        known = [config for its, config in self.stored if its == name and config["configurable"]["checkpoint_ns"] == ns]
        parent = known[at % len(known)] if has_parent and known else None
        handle = self.handles[at % len(self.handles)]
        self.stored.append(
            (
                name,
                put(
                    self.saver,
                    {"docs": handle, "list": [handle.to_dict()]},
                    name=name,
                    ns=ns,
                    parent=parent,
                    run_id=run,
                ),
            )
        )

    @precondition(lambda self: self.stored)
    @rule(
        at=st.integers(0, 100),
        handle=st.integers(0, 100),
        task=st.sampled_from(["t1", "t2"]),
        channel=st.sampled_from(["docs", "__interrupt__"]),
    )
    def put_writes(self, at: int, handle: int, task: str, channel: str) -> None:
        _, config = self.stored[at % len(self.stored)]
        # Of a task that comes back with another handle the inner saver keeps the first, and of its interrupts the last.
        self.saver.put_writes(config, [(channel, self.handles[handle % len(self.handles)])], task)

    @rule(name=THREADS)
    def delete(self, name: str) -> None:
        self.saver.delete_thread(name)

    @rule(source=THREADS, into=THREADS)
    def copy(self, source: str, into: str) -> None:
        self.saver.copy_thread(source, into)

    @rule(name=THREADS, strategy=st.sampled_from(["keep_latest", "delete"]))
    def prune(self, name: str, strategy: str) -> None:
        self.saver.prune([name], strategy=strategy)

    @rule(run=RUNS)
    def delete_run(self, run: str) -> None:
        self.saver.delete_for_runs([run])

    @rule(name=THREADS, when=st.sampled_from(["before", "after"]), what=st.sampled_from(["put", "writes", "delete"]))
    def die(self, name: str, when: str, what: str) -> None:
        """References are left open; a sweep settles them."""
        at = put(self.saver, {}, name=name)
        self.saver.put_writes(at, [("docs", self.handles[0])], "t1")
        act = {
            "delete": lambda: self.saver.delete_thread(name),
            "put": lambda: put(self.saver, {"docs": self.handles[-1]}, name=name),
            "writes": lambda: self.saver.put_writes(at, [("docs", self.handles[-1])], "t1"),
        }[what]
        self.inner.crash = when
        with pytest.raises(Crash):
            act()
        self.inner.crash = ""

    @rule()
    def reopen(self) -> None:
        self.saver.close()
        self.saver = KVCheckpointSaver(self.inner, self.broker, durability=self.durability, directory=self.folder.name)

    @rule()
    def sweep(self) -> None:
        self.saver.sweep(grace_s=0)
        assert self._referred() == self._held()

    @rule(at=st.integers(0, 100))
    def evict(self, at: int) -> None:
        self.broker.evict(self.handles[at % len(self.handles)])

    @invariant()
    def refers_to_what_the_saver_holds(self) -> None:
        if not hasattr(self, "saver"):
            return
        referred = self._referred()
        assert self._referred("WHERE state = 1") <= self._held() <= referred
        needed = {recipe.kv_id for _, kv_id in referred for recipe in self.broker.lineage(self._handle(kv_id))}
        stored = query(self.saver, "SELECT group_concat(kv_id) FROM recipes")[0]
        assert set((stored or "").split(",")) - {""} == needed
        assert bool(self.saver.stats().tensor_bytes) <= bool(needed)

    def _held(self) -> set[tuple[str, str]]:
        """What LangGraph sees."""
        return {
            (found.config["configurable"]["thread_id"], handle.kv_id)
            for found in self.inner.list(None)
            for handle in find_handles((found.checkpoint, found.pending_writes))
        }

    def _referred(self, where: str = "") -> set[tuple[str, str]]:
        pairs = query(self.saver, f"SELECT group_concat(DISTINCT thread_id || ' ' || kv_id) FROM refs {where}")[0]
        return {(pair.split(" ")[0], pair.split(" ")[1]) for pair in (pairs or "").split(",") if pair}

    def teardown(self) -> None:
        if hasattr(self, "saver"):
            for name in "abc":
                self.saver.delete_thread(name)
            self.saver.sweep(grace_s=0)
            stats = self.saver.stats()
            assert (stats.manifest.num_references, stats.manifest.num_recipes, stats.tensor_bytes) == (0, 0, 0)
            self.saver.close()
            self.folder.cleanup()

    def _handle(self, kv_id: str) -> KVHandle:
        return next(handle for handle in self.handles if handle.kv_id == kv_id)


def test_any_life_leaves_the_manifest_in_step_with_the_saver(open_broker: Callable[..., KVBroker]) -> None:
    Lives.broker = open_broker()
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=40,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
        ),
    )
