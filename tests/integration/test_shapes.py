"""Six kinds of message applications, ten turns each: the same tokens with KV and without, and what could be reused is."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentState
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Send
from langgraph_supervisor import create_supervisor

from aaflow_langgraph import KVBroker, KVChatModel, kv_state
from aaflow_langgraph.bench import apps
from aaflow_langgraph.bench.apps import SHAPES, converse
from aaflow_langgraph.cli import main
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.graph.serde import handle_serializer
from aaflow_langgraph.journal import Entry
from tests import templates, tiny
from tests.scripted import ScriptedBroker, scripted  # noqa: F401

TURNS = 10
POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine(
        tiny.model(max_position_embeddings=8192), tiny.tokenizer(templates.HERMES), name="tiny-shapes"
    )


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Leading tokens in common."""
    return next((number for number, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def reusable(broker: KVBroker, entries: Sequence[Entry]) -> int:
    """Tokens of prompts that begin as something computed before does, by brute force. The last token of a prompt always runs."""
    total, computed = 0, []
    for entry in entries:
        ids = broker.tokens_of(entry.kv_id)
        prompt = ids[: entry.num_context]
        total += max((min(shared(prompt, before), len(prompt) - 1) for before in computed), default=0)
        recipe = broker.find_recipe(entry.kv_id)
        assert recipe is not None
        computed.append(ids[: recipe.stop - recipe.num_pending])
    return total


def share_served(broker: KVBroker) -> float:
    """Of the reusable prompt tokens, those that were read from KV."""
    entries = broker.journal.entries()
    brute_force = reusable(broker, entries)
    # Siblings run at once: one may begin before what it could share is there.
    assert sum(entry.num_reusable for entry in entries) >= 0.99 * brute_force
    return sum(entry.num_reused for entry in entries) / brute_force


def conversations(broker: KVBroker) -> list[str]:
    """Names of all conversations, which are hashes of every token in them."""
    return sorted(entry.kv_id for entry in broker.journal.entries())


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_ten_turns_say_the_same_tokens_with_and_without_kv_and_reuse_what_can_be(
    engine: TransformersEngine, shape: str
) -> None:
    def talk(**options: Any) -> tuple[KVBroker, dict[str, Any]]:
        broker = KVBroker.open(engine, pool_bytes=POOL_BYTES)
        return broker, converse(SHAPES[shape](KVChatModel(broker, max_tokens=4, **options)), TURNS)

    broker, state = talk()
    with broker:
        # Deterministic requests reuse whole canonical blocks only: what can be reused is measured without.
        assert share_served(broker) >= 0.95
        said = conversations(broker)
        assert broker.check() == []
        assert {handle.kv_id for handle in state["kv_lineages"].values()} <= set(said)
    for kv in (True, False):
        broker, state = talk(kv=kv, deterministic=True)
        with broker:
            assert conversations(broker) == said
            assert (sum(entry.num_reused for entry in broker.journal.entries()) > 0) is kv


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")
def test_the_supervisor_package_reuses_what_can_be_and_says_the_same_without_kv(
    engine: TransformersEngine, scripted: None
) -> None:
    def script(prompt: str) -> str | None:
        """The supervisor hands over to one worker after the other, then answers."""
        this_turn = prompt.rpartition("Question")[2]
        for name in apps.WORKERS if "You lead" in prompt else ():
            if f"transfer_to_{name}" not in this_turn:
                return f'<tool_call>\n{{"name": "transfer_to_{name}", "arguments": {{}}}}\n</tool_call>'
        return f"Noted {len(prompt)}."

    said = []
    for kv in (True, False):
        with ScriptedBroker.open(engine, pool_bytes=POOL_BYTES) as broker:
            assert isinstance(broker, ScriptedBroker)
            broker.script = script
            model = KVChatModel(broker, max_tokens=120, kv=kv)
            agents = [create_agent(model, [], system_prompt=text, name=name) for name, text in apps.WORKERS.items()]
            builder = create_supervisor(
                agents, model=model, prompt="You lead a small harbour.", state_schema=kv_state(_Leading)
            )
            state = converse(builder, 4)  # its hand-overs are long: ten turns of bytes fill the window
            names = [message.name for message in state["messages"] if message.type == "ai" and message.text]
            assert names.count("clerk") >= 4
            assert names.count("engineer") >= 4
            if kv:
                assert share_served(broker) >= 0.95
            said.append(conversations(broker))
    assert said[0] == said[1]


class _Leading(AgentState[Any]):
    """What ``create_supervisor`` expects of a state."""

    remaining_steps: int


def lookup(word: str) -> str:
    """Look a word up."""
    return f"{word} is a boat"


def test_a_template_that_drops_reasoning_is_reused_to_the_token_where_it_does(scripted: None) -> None:
    """Two questions, each with a tool turn: reasoning stays until the next question, then the template leaves it out."""

    def script(prompt: str) -> str:
        if prompt.rpartition("<|im_start|>user")[2].startswith("\n<tool_response>"):
            return "<think>It says so.</think>A boat."
        return '<think>Look it up.</think><tool_call>\n{"name": "lookup", "arguments": {"word": "ferry"}}\n</tool_call>'

    said = []
    for kv in (True, False):
        reasoning = TransformersEngine(tiny.model(), tiny.tokenizer(templates.THINKING), name="tiny-thinking")
        with ScriptedBroker.open(reasoning, pool_bytes=POOL_BYTES) as broker:
            assert isinstance(broker, ScriptedBroker)
            broker.script = script
            agent = create_agent(KVChatModel(broker, kv=kv), [lookup], checkpointer=InMemorySaver())
            for question in ("What is a ferry? " * 20, "Once more?", "And again?"):
                agent.invoke({"messages": [HumanMessage(question)]}, {"configurable": {"thread_id": "1"}})
            entries = broker.journal.entries()
            said.append([entry.kv_id for entry in entries])
            if kv:
                assert share_served(broker) == 1.0
                for number, (before, now) in enumerate(pairwise(entries), start=1):
                    # A tool's answer goes on from all that was said; a question parts from it where reasoning stood.
                    assert (now.num_reused > before.num_context) is (number % 2 == 1)
                    assert now.num_reused > len("What is a ferry? ") * 20
    assert said[0] == said[1]


def test_parallel_agents_never_see_each_others_tokens(engine: TransformersEngine) -> None:
    canaries = [f"CANARY{number}" for number in range(6)]

    def study(task: Any) -> dict[str, Any]:
        return {"notes": [(task["topic"], model.invoke([*task["messages"], HumanMessage(task["topic"])]).text)]}

    builder = apps.StateGraph(kv_state(apps.Studying)).add_node("study", study)
    builder.add_conditional_edges(
        apps.START,
        lambda state: [Send("study", {"messages": state["messages"], "topic": canary}) for canary in canaries],
        ["study"],
    )
    graph = builder.compile(InMemorySaver(serde=handle_serializer()))
    with KVBroker.open(engine, pool_bytes=POOL_BYTES) as broker:
        model = KVChatModel(broker, max_tokens=8)
        given = {"messages": [HumanMessage("What all of them read. " * 12, id="shared")]}
        notes = dict(graph.invoke(given, {"configurable": {"thread_id": "1"}})["notes"])
        entries = broker.journal.entries()
        assert len(entries) == len(canaries)
        for entry in entries:
            seen = broker.engine.frame.spell(broker.tokens_of(entry.kv_id))
            assert sum(canary in seen for canary in canaries) == 1
        # Nor do they hear each other through KV: each says what it says alone.
        model = KVChatModel(broker, max_tokens=8, kv=False)
        for canary in canaries:
            assert notes[canary] == model.invoke([*given["messages"], HumanMessage(canary)]).text


@pytest.mark.slow
def test_the_bench_says_what_was_reused_and_whether_answers_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny.save(tmp_path / "model", max_position_embeddings=8192))
    assert main(["bench", "shapes", "--model", model, "--turns", "2", "--output", "2"]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(document["shapes"]) == list(SHAPES)
    assert document["answers_equal"] is True
    for shape in document["shapes"].values():
        assert shape["calls"] >= 6
        assert shape["served"] >= 0.95
        assert 0 < shape["reused_tokens"] <= shape["reusable_tokens"] < shape["prompt_tokens"]


def test_what_a_brute_force_search_finds() -> None:
    assert [shared(*pair) for pair in (([], [1]), ([1, 2], [1, 2, 3]), ([1, 2], [1, 3]), ([2], [1]))] == [0, 2, 1, 0]
