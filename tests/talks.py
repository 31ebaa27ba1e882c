"""A conversation that runs in processes through a checkpointer, and dies there where it is told to. Not a test itself."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import torch
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVCheckpointSaver, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.checkpoint.sidecar import Sidecar
from aaflow_langgraph.pool.disk import DiskPool
from tests import tiny
from tests.brokers import MIB
from tests.processes import _context

# As in tests/brokers.py: who is imported last names all.
_context.set_forkserver_preload(["tests.processes", "tests.brokers", "tests.talks"])

THREAD: RunnableConfig = {"configurable": {"thread_id": "talk"}}
SHORT = Sampling(max_tokens=4)

POINTS: dict[str, tuple[type, str, bool]] = {
    "behind the recipes": (Sidecar, "note", False),
    "among the tensors": (DiskPool, "write", False),
    "behind the tensors": (KVBroker, "persist", False),
    "behind the writes": (SqliteSaver, "put_writes", False),
    "before the checkpoint": (SqliteSaver, "put", True),
    "behind the checkpoint": (SqliteSaver, "put", False),
}
"""Where a process may end: the method, and whether before or behind it."""


class Talk(TypedDict, total=False):
    question: str
    heard: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    answers: Annotated[list[list[int]], operator.add]


def questions(count: int) -> list[str]:
    return [f"Question {number}: how high is mountain number {number * 37 % 101}, and why?" for number in range(count)]


def talking(broker: KVBroker, sampling: Sampling = SHORT) -> StateGraph[Any]:
    """A turn: hear the question, then answer behind it."""

    def listen(state: Talk) -> dict[str, Any]:
        return {"heard": broker.prefill(state["question"], parent=state.get("plan"), label="heard").handle}

    def answer(state: Talk) -> dict[str, Any]:
        made = broker.generate("Be brief.", parent=state["heard"], sampling=sampling, label="plan")
        return {"plan": made.handle, "answers": [list(made.token_ids)]}

    builder: StateGraph[Any] = StateGraph(Talk)
    builder.add_node("listen", listen)
    builder.add_node("answer", answer)
    builder.add_edge(START, "listen")
    builder.add_edge("listen", "answer")
    builder.add_edge("answer", END)
    return builder


def go_on(graph: Any, asked: Sequence[str], config: RunnableConfig = THREAD) -> list[list[int]]:
    """What is left of a conversation: the turn that was begun, then the others; all answers."""
    if graph.get_state(config).created_at:
        graph.invoke(None, config)  # new input would discard what the last step wrote, if its checkpoint is not there
    while len(answers := graph.get_state(config).values.get("answers", [])) < len(asked):
        graph.invoke({"question": asked[len(answers)]}, config)
    return list(answers)


class Talker:
    """A process with a broker and a saver of its own. ``talker(count)`` goes on until so many questions are answered."""

    def __init__(self, folder: Path, run_dir: Path, **options: Any) -> None:
        self._pipe, theirs = _context.Pipe()
        places = {"XDG_CACHE_HOME": os.environ["XDG_CACHE_HOME"], "XDG_RUNTIME_DIR": str(run_dir)}
        self._process = _context.Process(target=_talk, args=(theirs, places, folder, options), daemon=True)
        self._process.start()
        theirs.close()

    def __call__(self, count: int) -> dict[str, Any]:
        self._pipe.send(count)
        assert self._pipe.poll(120), "a talker did not answer for two minutes"
        answer: dict[str, Any] = self._pipe.recv()
        return answer

    def exit_code_after(self, count: int) -> int:
        """For one that ends on the way."""
        self._pipe.send(count)
        try:
            answer = self._pipe.recv()
        except EOFError:
            self._process.join()
            return self._end()
        self.kill()
        raise AssertionError(f"it should have died, and answered {len(answer['answers'])} questions")

    def close(self) -> int:
        """Close saver and broker; the exit status."""
        self._pipe.send(0)
        self._process.join()
        return self._end()

    def kill(self) -> None:
        """SIGKILL, and wait for the end. Idempotent."""
        if not self._pipe.closed:
            self._process.kill()
            self._process.join()
            self._end()

    def _end(self) -> int:
        code = self._process.exitcode
        assert code is not None
        self._pipe.close()
        self._process.close()
        return code


def _talk(pipe: Connection, places: dict[str, str], folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ.update(places)
    if die_at := options.pop("die_at", None):
        _die_at(*die_at)
    durability = options.pop("durability", "sync")
    engine = TransformersEngine(tiny.model("llama"), tiny.tokenizer(), name="tiny-llama")
    with (
        KVBroker.open(engine, pool_bytes=options.pop("pool_bytes", 8 * MIB), **options) as broker,
        KVCheckpointSaver.local(folder, broker, durability=durability) as saver,
    ):
        graph = talking(broker).compile(checkpointer=saver)
        while count := pipe.recv():
            before = broker.stats()
            answers = go_on(graph, questions(count))
            now = broker.stats()
            plan = graph.get_state(THREAD).values["plan"]
            pipe.send(
                {
                    "answers": answers,
                    "kv_id": plan.kv_id,
                    "num_recomputed": now.num_recomputed_tokens - before.num_recomputed_tokens,
                    "num_prefilled": now.num_prefilled_tokens - before.num_prefilled_tokens,
                    "num_fetches": now.num_fetches - before.num_fetches,
                }
            )


def _die_at(point: str, occurrence: int) -> None:
    """This process ends at the ``occurrence``-th time that it comes to a point, whatever thread that is on."""
    owner, method, is_before = POINTS[point]
    real: Callable[..., Any] = getattr(owner, method)
    passed: list[None] = []

    def come_to_it() -> None:
        passed.append(None)
        if len(passed) == occurrence:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(*args: Any, **kwargs: Any) -> Any:
        if is_before:
            come_to_it()
        result = real(*args, **kwargs)
        if not is_before:
            come_to_it()
        return result

    setattr(owner, method, watched)
