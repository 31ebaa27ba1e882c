"""A checkpoint that holds a composite keeps what it was composed of, and lets go of it with the thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVCheckpointSaver, KVHandle, Sampling, generate_node
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests.oracle import prose


class State(TypedDict, total=False):
    context: Annotated[KVHandle, KVChannel]
    answer: str


def graph_of(broker: KVBroker, saver: KVCheckpointSaver):  # type: ignore[no-untyped-def]
    def join(state: State) -> State:
        docs = [broker.prefill(prose(80, seed=seed)).handle for seed in range(3)]
        return {"context": broker.compose(docs).handle}

    ask = generate_node(
        broker, "and?", reads="context", writes="context", text_to="answer", sampling=Sampling(max_tokens=6)
    )
    builder = StateGraph(State).add_sequence([("join", join), ("ask", ask)]).add_edge(START, "join")
    return builder.compile(checkpointer=saver)


def test_a_composite_in_a_checkpoint_is_composed_again_after_a_restart_without_tensors(
    engines: Callable[..., TransformersEngine], tmp_path: Path
) -> None:
    config = {"configurable": {"thread_id": "t"}}
    with KVBroker.open(engines("llama"), pool_bytes=16 << 20) as broker:
        with KVCheckpointSaver.local(tmp_path, broker, durability="recipe") as saver:
            state = graph_of(broker, saver).invoke({}, config)
        expected = broker.generate("more?", parent=state["context"], sampling=Sampling(max_tokens=6))
    with (
        KVBroker.open(engines("llama"), pool_bytes=16 << 20) as broker,
        KVCheckpointSaver.local(tmp_path, broker, durability="recipe") as saver,
    ):
        stored = graph_of(broker, saver).get_state(config).values["context"]
        assert stored == state["context"]
        again = broker.generate("more?", parent=stored, sampling=Sampling(max_tokens=6))
        assert again.token_ids == expected.token_ids
        assert len(broker.segments_of(stored)) == 3
        assert saver.stats().manifest.num_recipes == 5  # three segments, the composite, the answer
        saver.delete_thread("t")
        assert saver.stats().manifest.num_recipes == 0
    with (
        KVBroker.open(engines("llama"), pool_bytes=16 << 20) as broker,
        KVCheckpointSaver.local(tmp_path, broker, durability="recipe"),
    ):
        assert broker.find_recipe(stored.kv_id) is None
