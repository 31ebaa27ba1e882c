"""A process is killed in the middle of a thread; the next one goes on where it was and computes nothing again.

    read ──> plan ──> cliff (the first process dies here) ──> answer

The handles are in the checkpoint, their recipes and KV lie beside it. With text in the state, the second process would prefill the
documents, the question and the plan anew before it could go on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from typing import Annotated, Any

from compared import POOL_BYTES, Run, command, load, nodes_of, parse, run
from langgraph.graph import END, START, StateGraph
from reports import ALL
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVCheckpointSaver, KVHandle, TransformersEngine

THREAD: Any = {"configurable": {"thread_id": "1"}}


class State(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    plan: Annotated[KVHandle, KVChannel]
    plan_text: str
    answer: str


def build(broker: KVBroker, saver: Any = None, *, dies: bool = False) -> Any:
    def cliff(state: State) -> dict[str, Any]:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return {}

    read, generate = nodes_of(broker)
    builder = StateGraph(State)
    builder.add_node("read", read(ALL, writes="docs"))
    builder.add_node(
        "plan",
        generate("Which report needs a decision first, and why?", reads="docs", writes="plan", text_to="plan_text"),
    )
    builder.add_node("cliff", cliff)
    builder.add_node("answer", generate("What does that cost?", reads="plan", text_to="answer"))
    builder.add_edge(START, "read")
    builder.add_edge("read", "plan")
    builder.add_edge("plan", "cliff")
    builder.add_edge("cliff", "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=saver)


def first_life(model: str, folder: str) -> None:
    """What the process does that is killed. ``"sync"``: KV is on the disk before a checkpoint is, and that before the next step."""
    with (
        KVBroker.open(load(model), pool_bytes=POOL_BYTES) as broker,
        KVCheckpointSaver.local(folder, broker, durability="sync") as saver,
    ):
        build(broker, saver, dies=True).invoke({}, THREAD, durability="sync")


def main() -> int:
    arguments = parse(__doc__ or "")
    recomputed: list[int] = []

    def both(engine: TransformersEngine) -> tuple[Run, Run]:
        with tempfile.TemporaryDirectory() as folder:
            first = multiprocessing.get_context("spawn").Process(target=first_life, args=(arguments.model, folder))
            first.start()
            first.join()
            with (
                KVBroker.open(engine, pool_bytes=POOL_BYTES) as broker,
                KVCheckpointSaver.local(folder, broker, durability="sync") as saver,
            ):
                graph = build(broker, saver)
                print(f"The first process ended with {first.exitcode}; to be done: {graph.get_state(THREAD).next}")
                resumed = run(graph, None, THREAD)
                recomputed.append(broker.stats().num_recomputed_tokens)
                print(f"Tokens computed again after the restart: {recomputed[0]}")
        with KVBroker.open(engine, pool_bytes=POOL_BYTES, kv=False) as broker:
            text = run(build(broker), {})
        return resumed, Run(text.state, text.of("answer"))  # the node that the second process had to run

    status = command("resume_after_restart", __doc__ or "", both, ["plan_text", "answer"])
    return status or int(recomputed != [0])


if __name__ == "__main__":
    sys.exit(main())
