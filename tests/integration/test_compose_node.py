"""Branches that meet: the channel in running graphs, the node that joins, and judges that read nothing approximate."""

from __future__ import annotations

import itertools
import json
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from pydantic import BaseModel
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBranches,
    KVBroker,
    KVChannel,
    KVCheckpointSaver,
    KVCompose,
    KVComposite,
    KVHandle,
    Sampling,
    compose_node,
    generate_node,
    prefill_node,
)
from aaflow_langgraph.composite import ComposePolicy
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import AAFlowError, ConfigError, IncompatibleHandle, MalformedHandle
from aaflow_langgraph.graph.serde import handle_serializer
from tests import tiny

COLOURS = pytest.mark.parametrize("colour", ["sync", "async"])
TEXTS = {
    "berlin": "Berlin is the capital of Germany. It has many museums. ",
    "oslo": "Oslo is the capital of Norway. It has a fjord. ",
    "rome": "Rome is the capital of Italy. It has an old forum. ",
}
SHORT = Sampling(max_tokens=6)


class State(TypedDict, total=False):
    question: str
    text: str
    topic: str
    sources: Annotated[KVHandle | KVComposite, KVCompose]
    tuned: Annotated[KVHandle | KVComposite, KVCompose(rung="legolink", k=4)]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    first: Annotated[KVHandle, KVChannel]
    second: Annotated[KVHandle, KVChannel]
    context: Annotated[KVHandle, KVChannel]
    answer: str
    report: dict[str, Any]


@pytest.fixture(scope="module")
def broker() -> Iterator[KVBroker]:
    """One broker for the file; clean when all of it is over."""
    engine = TransformersEngine(tiny.model(), tiny.tokenizer(), name="tiny-llama")
    with KVBroker.open(engine, pool_bytes=16 << 20) as opened:
        yield opened
        assert opened.check() == []
        assert opened.stats().num_leases == 0


@pytest.fixture(scope="module")
def docs(broker: KVBroker) -> dict[str, KVHandle]:
    return {name: broker.prefill(text, label=name).handle for name, text in TEXTS.items()}


async def run(graph: Any, value: Any, colour: str, config: Any = None) -> Any:
    return graph.invoke(value, config) if colour == "sync" else await graph.ainvoke(value, config)


def thread(name: str = "1") -> Any:
    return {"configurable": {"thread_id": name}}


def reading(broker: KVBroker, key: str = "sources", names: Sequence[str] = tuple(TEXTS)) -> StateGraph[Any]:
    """Nodes that encode one text each, side by side."""
    builder: StateGraph[Any] = StateGraph(State)
    for name in names:
        builder.add_node(name, prefill_node(broker, TEXTS[name], writes=key, label=name))
        builder.add_edge(START, name)
    return builder


# --- the channel in a running graph ---


@COLOURS
async def test_branches_of_plain_edges_meet_in_one_composite_in_any_order(
    broker: KVBroker, docs: dict[str, KVHandle], colour: str
) -> None:
    for names in itertools.permutations(TEXTS):
        result = await run(reading(broker, names=names).compile(), {}, colour)
        assert result["sources"] == KVComposite.of(docs.values())
        assert result["sources"].kv_composite_id == KVComposite.of(docs.values()).kv_composite_id


@COLOURS
async def test_branches_of_send_meet_in_one_composite_in_any_order(
    broker: KVBroker, docs: dict[str, KVHandle], colour: str
) -> None:
    for names in itertools.permutations(TEXTS):
        builder: StateGraph[Any] = StateGraph(State)
        builder.add_node("read", prefill_node(broker, "{text}", writes="sources"))
        builder.add_conditional_edges(
            START, lambda state, names=names: [Send("read", {"text": TEXTS[name]}) for name in names]
        )
        result = await run(builder.compile(), {}, colour)
        # They all have the label "sources", so they stand by id.
        assert result["sources"] == KVComposite.joined(
            sorted(docs.values(), key=lambda handle: handle.kv_id), KVComposite.of(docs.values()).policy
        )


def test_one_branch_alone_stays_a_handle(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    assert reading(broker, names=["oslo"]).compile().invoke({})["sources"] == docs["oslo"]


def test_handles_by_name_stand_by_name(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("a", lambda state: {"sources": {"2": docs["berlin"]}})
    builder.add_node("b", lambda state: {"sources": {"1": docs["rome"], "3": docs["oslo"]}})
    builder.add_edge(START, "a")
    builder.add_edge(START, "b")
    joined = builder.compile().invoke({})["sources"]
    assert joined.kv_children == (docs["rome"], docs["berlin"], docs["oslo"])


SERIALIZERS = [
    pytest.param(handle_serializer(), id="allowed"),
    pytest.param(JsonPlusSerializer(allowed_msgpack_modules=None), id="strict"),
]


def savers(kind: str, serializer: Any, folder: Path) -> BaseCheckpointSaver[Any]:
    if kind == "memory":
        return InMemorySaver(serde=serializer)
    return SqliteSaver(sqlite3.connect(folder / "state.db", check_same_thread=False), serde=serializer)


@pytest.mark.parametrize("serializer", SERIALIZERS)
@pytest.mark.parametrize(("kind", "colour"), [("memory", "sync"), ("memory", "async"), ("sqlite", "sync")])
async def test_a_step_that_an_interrupt_cuts_in_two_gives_the_same_composite(
    broker: KVBroker, docs: dict[str, KVHandle], kind: str, serializer: Any, colour: str, tmp_path: Path
) -> None:
    """Siblings that were done wait in the pending writes while one of them asks."""

    def ask(state: State) -> dict[str, Any]:
        return {"sources": {"oslo": docs["oslo"]} if interrupt("may I?") == "yes" else None}

    def build(saver: BaseCheckpointSaver[Any]) -> Any:
        builder = reading(broker, names=["rome", "berlin"])
        builder.add_node("ask", ask)
        builder.add_edge(START, "ask")
        return builder.compile(checkpointer=saver)

    saver = savers(kind, serializer, tmp_path)
    stopped = await run(build(saver), {}, colour, thread())
    assert "__interrupt__" in stopped
    graph = build(saver)
    graph.checkpointer = saver  # as a platform does that swaps the saver: no type of the graph is allowed
    result = await run(graph, Command(resume="yes"), colour, thread())
    assert result["sources"] == KVComposite.of(docs.values())
    stored = build(saver).get_state(thread()).values["sources"]
    assert isinstance(stored, KVComposite)
    assert stored.kv_composite_id == KVComposite.of(docs.values()).kv_composite_id
    if kind == "sqlite":
        saver.conn.close()  # type: ignore[attr-defined]


def test_an_edited_dict_becomes_a_composite_again_and_garbage_keeps_it(
    broker: KVBroker, docs: dict[str, KVHandle]
) -> None:
    graph = reading(broker).compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    made = graph.invoke({}, thread())["sources"]
    edited = {**json.loads(json.dumps(made.to_dict())), "kv_k": 3}
    graph.update_state(thread(), {"sources": edited}, as_node="rome")
    assert graph.get_state(thread()).values["sources"] == KVComposite.of(docs.values(), k=3)
    graph.update_state(thread(), {"sources": {**edited, "kv_k": -3}}, as_node="rome")
    assert graph.get_state(thread()).values["sources"] == KVComposite.of(docs.values(), k=3)


@dataclass
class DataclassState:
    sources: Annotated[KVHandle | KVComposite | None, KVCompose(k=3)] = None


class PydanticState(BaseModel):
    sources: Annotated[KVHandle | KVComposite | None, KVCompose(k=3)] = None


@pytest.mark.parametrize("schema", [DataclassState, PydanticState])
def test_the_channel_serves_dataclass_and_pydantic_states_and_has_a_json_schema(
    schema: Any, docs: dict[str, KVHandle]
) -> None:
    seen: list[Any] = []
    builder: StateGraph[Any] = StateGraph(schema)
    builder.add_node("a", lambda state: {"sources": docs["rome"]})
    builder.add_node("b", lambda state: {"sources": docs["oslo"]})

    def see(state: Any) -> Any:
        seen.append(state.sources)
        return state  # echoes every field

    builder.add_node("c", see)
    for name in ("a", "b"):
        builder.add_edge(START, name)
    builder.add_edge(["a", "b"], "c")
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    expected = KVComposite.of([docs["rome"], docs["oslo"]], k=3)
    assert graph.invoke({}, thread())["sources"] == expected
    assert seen == [expected]
    assert "kv_child_ids" in json.dumps(graph.get_output_jsonschema())


# --- the node that joins ---


def joining(broker: KVBroker, *, key: str = "sources", names: Sequence[str] = tuple(TEXTS), **options: Any) -> Any:
    """Texts side by side, then the node that joins them."""
    builder = reading(broker, key, names)
    builder.add_node("join", compose_node(broker, reads=key, writes="context", report_to="report", **options))
    builder.add_edge(list(names), "join")
    builder.add_edge("join", END)
    return builder


@COLOURS
async def test_a_fan_in_is_a_compose_with_one_id_in_any_order_of_arrival(
    broker: KVBroker, docs: dict[str, KVHandle], colour: str
) -> None:
    expected = broker.compose(KVComposite.of(docs.values(), rung="blend")).handle
    for names in itertools.permutations(TEXTS):
        result = await run(joining(broker, names=names, rung="blend").compile(), {}, colour)
        assert result["context"] == expected
        assert not result["context"].kv_exact
    text = broker.engine.frame.decode(broker.token_ids(expected))
    assert [text.count(part.strip()) for part in TEXTS.values()] == [1, 1, 1]
    assert text.index("Berlin") < text.index("Oslo") < text.index("Rome")


def test_addresses_are_joined_in_the_order_in_which_they_are_named(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    state = {
        "first": docs["rome"],
        "second": docs["berlin"],
        "drafts": {"x": docs["oslo"], "y": docs["rome"].to_dict()},
    }
    node = compose_node(broker, reads=["first", "drafts.x", "second"], writes="context", rung="legolink", k=2)
    ordered = [docs["rome"], docs["oslo"], docs["berlin"]]
    assert node.invoke(state)["context"] == broker.compose(ordered, rung="legolink", k=2).handle


def test_a_key_of_branches_is_joined_by_branch_name(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    state = {"drafts": {"z": docs["berlin"], "a": docs["rome"], "m": docs["oslo"]}}
    made = compose_node(broker, reads="drafts", writes="context", rung="legolink").invoke(state)["context"]
    assert made == broker.compose([docs["rome"], docs["oslo"], docs["berlin"]], rung="legolink").handle


def test_one_handle_alone_is_that_handle(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    made = compose_node(broker, reads="sources", writes="context").invoke({"sources": docs["oslo"]})["context"]
    assert made == docs["oslo"]


def test_what_the_node_leaves_open_is_as_the_channel_asks(broker: KVBroker) -> None:
    asked = joining(broker, key="tuned").compile().invoke({})["report"]
    assert (asked["rung"], asked["k"]) == ("legolink", 4)
    told = joining(broker, key="tuned", k=2).compile().invoke({})["report"]
    assert (told["rung"], told["k"]) == ("legolink", 2)
    other = joining(broker, key="tuned", rung="blend", r=0.5).compile().invoke({})["report"]
    assert (other["rung"], other["r"]) == ("blend", 0.5)
    exact = joining(broker, key="tuned", exact=True).compile().invoke({})
    assert exact["report"]["exact"]
    assert exact["context"].kv_exact


def test_a_composite_that_asks_for_exactness_gets_it_whatever_the_node_says(
    broker: KVBroker, docs: dict[str, KVHandle]
) -> None:
    strict = KVComposite.of([docs["oslo"], docs["rome"]], exact=True)
    node = compose_node(broker, reads=["sources", "first"], writes="context", rung="legolink", report_to="report")
    result = node.invoke({"sources": strict, "first": docs["berlin"]})
    assert result["report"]["exact"]
    assert result["context"].kv_exact


@COLOURS
async def test_the_report_goes_to_the_custom_stream_and_to_the_state_as_plain_json(
    broker: KVBroker, docs: dict[str, KVHandle], colour: str
) -> None:
    graph = joining(broker, rung="legolink", k=3, audit=True).compile()
    if colour == "sync":
        events = list(graph.stream({}, stream_mode=["custom", "values"]))
    else:
        events = [event async for event in graph.astream({}, stream_mode=["custom", "values"])]
    (event,) = [value for mode, value in events if mode == "custom" and value["type"] == "aaflow.compose"]
    result = events[-1][1]
    report = result["report"]
    assert json.loads(json.dumps(report)) == report
    assert event == {"type": "aaflow.compose", "node": "join", **report}
    assert report["kv_id"] == result["context"].kv_id
    assert (report["rung"], report["k"], report["num_segments"], report["exact"], report["gate"]) == (
        "legolink",
        3,
        3,
        False,
        "",
    )
    assert report["num_tokens"] == result["context"].kv_tokens
    assert report["audit"]["kl"] >= 0


def test_a_node_that_reads_a_composite_joins_it_and_says_so(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    composite = KVComposite.of(docs.values(), rung="legolink", k=2)
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node(
        "ask",
        generate_node(broker, "Name one.", reads="sources", writes="context", text_to="answer", sampling=SHORT),
    )
    builder.add_edge(START, "ask")
    for written in (composite, composite.to_dict()):
        events = list(builder.compile().stream({"sources": written}, stream_mode=["custom", "values"]))
        (event,) = [value for mode, value in events if mode == "custom" and value["type"] == "aaflow.compose"]
        joined = broker.compose(composite).handle
        assert (event["node"], event["kv_id"], event["rung"]) == ("ask", joined.kv_id, "legolink")
        assert events[-1][1]["answer"] == broker.generate("Name one.", parent=joined, sampling=SHORT).text
        assert broker.recipe(events[-1][1]["context"]).parent == joined.kv_id
    longer = prefill_node(broker, "And Bern.", reads="sources", writes="context").invoke({"sources": composite})
    assert longer["context"] == broker.prefill("And Bern.", parent=joined).handle


def test_a_deterministic_node_joins_what_it_reads_exactly(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    composite = KVComposite.of(docs.values(), rung="blend")
    node = generate_node(broker, "Name one.", reads="sources", writes="context", sampling=SHORT, deterministic=True)
    made = node.invoke({"sources": composite})["context"]
    assert made.kv_exact
    joined = broker.compose(composite, exact=True, deterministic=True).handle
    assert made == broker.generate("Name one.", parent=joined, sampling=SHORT, deterministic=True).handle
    both = compose_node(broker, reads="sources", writes="context", exact=True, deterministic=True)
    assert both.invoke({"sources": composite})["context"] == joined


def test_a_thread_that_is_interrupted_behind_the_join_joins_once(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    joined: list[KVHandle] = []
    node = compose_node(broker, reads="sources", writes="context", rung="legolink", k=5)

    def review(state: State) -> dict[str, Any]:
        joined.append(node.invoke(state)["context"])
        interrupt("fine?")
        return {"context": joined[-1]}

    builder = reading(broker)
    builder.add_node("review", review)
    builder.add_edge(list(TEXTS), "review")
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    graph.invoke({}, thread())
    used = broker.stats().pool_used_bytes
    result = graph.invoke(Command(resume=True), thread())
    assert len(joined) == 2
    assert joined[0] == joined[1] == result["context"]
    assert broker.stats().pool_used_bytes == used


def test_a_composite_in_a_checkpoint_is_joined_by_another_broker(
    open_broker: Callable[..., KVBroker], tmp_path: Path
) -> None:
    """The saver keeps the recipes of the children: nobody joined them in the process that is gone."""

    def graph(broker: KVBroker, saver: KVCheckpointSaver) -> Any:
        return joining(broker, rung="legolink", k=5).compile(checkpointer=saver, interrupt_before=["join"])

    first = open_broker()
    with KVCheckpointSaver.local(tmp_path, first) as saver:
        sources = graph(first, saver).invoke({}, thread())["sources"]
    expected = first.compose(sources.kv_children, rung="legolink", k=5).handle
    first.close()
    second = open_broker()
    with KVCheckpointSaver.local(tmp_path, second) as saver:
        assert graph(second, saver).invoke(None, thread())["context"] == expected


# --- sources that were edited ---


def test_an_edited_source_is_joined_exactly_and_the_report_says_which(broker: KVBroker) -> None:
    builder: StateGraph[Any] = StateGraph(State)
    builder.add_node("manual", prefill_node(broker, TEXTS["rome"], writes="sources", label="manual"))
    builder.add_node("ticket", prefill_node(broker, "{text}", writes="sources", label="ticket"))
    builder.add_node(
        "join", compose_node(broker, reads="sources", writes="context", rung="legolink", report_to="report")
    )
    for name in ("manual", "ticket"):
        builder.add_edge(START, name)
    builder.add_edge(["manual", "ticket"], "join")
    graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
    first = graph.invoke({"text": "The printer is on fire."}, thread())
    assert (first["report"]["gate"], first["report"]["rung"]) == ("", "legolink")
    again = graph.invoke({"text": "The printer is on fire."}, thread())
    assert (again["report"]["gate"], again["context"]) == ("", first["context"])
    edited = graph.invoke({"text": "The printer is out of paper."}, thread())
    assert edited["report"]["gate"] == "edited: ticket"
    assert edited["report"]["exact"]
    assert edited["context"].kv_exact
    dense = broker.compose(edited["sources"].kv_children, exact=True).handle
    assert edited["context"] == dense
    twice = graph.invoke({"text": "The printer is out of ink."}, thread())
    assert twice["report"]["gate"] == "edited: ticket", "also behind a join that was exact"
    other = graph.invoke({"text": "The printer is out of paper."}, thread("2"))
    assert other["report"]["gate"] == "", "another thread has no earlier source"


def test_an_edit_is_seen_behind_what_was_appended_to_the_join(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    node = compose_node(broker, reads="drafts", writes="context", rung="legolink", report_to="report")
    joined = node.invoke({"drafts": {"a": docs["oslo"], "b": docs["rome"]}})["context"]
    longer = broker.generate("Which is larger?", parent=joined, sampling=SHORT).handle
    later = node.invoke({"drafts": {"a": docs["oslo"], "b": docs["berlin"]}, "context": longer})
    assert later["report"]["gate"] == "edited: b"
    more = node.invoke({"drafts": {"a": docs["oslo"], "b": docs["rome"], "c": docs["berlin"]}, "context": longer})
    assert more["report"]["gate"] == "", "a source that was added is no edit"


@pytest.mark.parametrize("report", [None, "text", {"segments": 7}, {"segments": [7, {"label": 3}, {"kv_id": {}}]}])
def test_a_report_that_was_edited_by_hand_does_no_harm(
    broker: KVBroker, docs: dict[str, KVHandle], report: Any
) -> None:
    node = compose_node(broker, reads="drafts", writes="context", rung="legolink", report_to="report")
    state = {"drafts": {"a": docs["oslo"], "b": docs["rome"]}, "context": docs["berlin"], "report": report}
    assert node.invoke(state)["report"]["gate"] == ""


@pytest.mark.parametrize("earlier", [None, "text", KVHandle("0" * 64, "1" * 64, 3), {"kv_id": 7}])
def test_what_is_no_known_join_under_writes_gates_nothing(
    broker: KVBroker, docs: dict[str, KVHandle], earlier: Any
) -> None:
    node = compose_node(broker, reads="drafts", writes="context", rung="legolink", report_to="report")
    for value in (earlier, docs["oslo"], KVHandle("0" * 64, broker.namespace.digest, 3)):
        report = node.invoke({"drafts": {"a": docs["oslo"], "b": docs["rome"]}, "context": value})["report"]
        assert (report["gate"], report["rung"]) == ("", "legolink")


# --- judges ---


@pytest.mark.parametrize("role", ["judge", "critic", "verifier"])
def test_a_judge_reads_the_same_tokens_computed_densely(broker: KVBroker, docs: dict[str, KVHandle], role: str) -> None:
    approximate = broker.compose(list(docs.values()), rung="legolink", k=0).handle
    dense = broker.exact(approximate)
    assert dense.kv_exact
    assert broker.token_ids(dense) == broker.token_ids(approximate)
    node = generate_node(broker, "Judge.", reads="context", writes="first", text_to="answer", role=role, sampling=SHORT)
    verdict = node.invoke({"context": approximate})
    expected = broker.generate("Judge.", parent=dense, sampling=SHORT)
    assert (verdict["first"], verdict["answer"]) == (expected.handle, expected.text)
    assert broker.recipe(verdict["first"]).turns[-2].role == "user"
    remark = prefill_node(broker, "Mind the fjord.", reads="context", writes="first", role=role)
    assert remark.invoke({"context": approximate})["first"] == broker.prefill("Mind the fjord.", parent=dense).handle


def test_a_judge_joins_a_composite_exactly_whatever_it_asks_for(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    builder: StateGraph[Any] = StateGraph(State)
    node = generate_node(broker, "Judge.", reads="sources", writes="context", role="judge", sampling=SHORT)
    builder.add_node("judge", node)
    builder.add_edge(START, "judge")
    half = broker.compose([docs["oslo"], docs["rome"]], rung="legolink", k=0).handle
    for children in (docs.values(), [half, docs["berlin"]]):
        composite = KVComposite.of(children, rung="blend")
        events = list(builder.compile().stream({"sources": composite}, stream_mode=["custom", "values"]))
        (event,) = [value for mode, value in events if mode == "custom" and value["type"] == "aaflow.compose"]
        assert (event["gate"], event["exact"]) == ("role: judge", True)
        assert events[-1][1]["context"].kv_exact


def test_a_misspelt_judge_is_refused(broker: KVBroker) -> None:
    with pytest.raises(ConfigError, match="role='judge'"):
        generate_node(broker, "Judge.", reads="first", writes="context", role="Judge", sampling=SHORT)


def test_a_label_that_several_segments_bear_tells_of_no_edit(broker: KVBroker) -> None:
    docs = [broker.prefill(text, label="src").handle for text in ("one ", "two ", "three ")]
    node = compose_node(broker, reads=["sources"], writes="context", report_to="report")
    first = node.invoke({"sources": KVComposite.joined(docs[:2], ComposePolicy())})
    more = node.invoke({"sources": KVComposite.joined(docs, ComposePolicy()), **first})
    assert more["report"]["gate"] == ""


def test_a_judge_of_something_exact_reads_it_as_it_is(broker: KVBroker, docs: dict[str, KVHandle]) -> None:
    node = generate_node(broker, "Judge.", reads="first", writes="context", role="judge", sampling=SHORT)
    assert broker.recipe(node.invoke({"first": docs["oslo"]})["context"]).parent == docs["oslo"].kv_id
    fresh = generate_node(broker, "Judge.", writes="context", role="judge", sampling=SHORT).invoke({})["context"]
    assert fresh == broker.generate("Judge.", sampling=SHORT).handle


# --- input that cannot be right ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reads": []}, "reads must be"),
        ({"reads": None}, "reads must be"),
        ({"reads": [3]}, "reads must be text"),
        ({"reads": [""]}, "reads"),
        ({"writes": None}, "writes="),
        ({"writes": "a.b"}, "no state key"),
        ({"report_to": "context"}, "different state keys"),
        ({"k": -1}, "k must be"),
        ({"r": 1.5}, "r must be"),
        ({"r": -0.1}, "r must be"),
        ({"rung": "magic"}, "rung must be"),
        ({"max_deviation": -1}, "max_deviation must be"),
        ({"exact": "yes"}, "exact must be"),
        ({"exact": True, "rung": "legolink"}, "no approximate rung"),
        ({"audit": 1}, "audit must be"),
        ({"label": "l" * 65}, "at most 64"),
        ({"deterministic": 1}, "deterministic must be"),
        ({"deterministic": True}, "pass exact=True"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_when_the_node_is_made(
    broker: KVBroker, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_node(broker, **{"reads": "sources", "writes": "context", **options})


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        ({}, ConfigError, "has to run before"),
        ({"sources": None}, ConfigError, "has to run before"),
        ({"sources": {}}, ConfigError, "has to run before"),
        ({"sources": "text"}, MalformedHandle, "'sources'"),
        ({"sources": {"a": "text"}}, MalformedHandle, "'sources'"),
        ({"sources": {"kv_child_ids": []}}, MalformedHandle, "'sources'"),
        ({"sources": KVHandle("0" * 64, "1" * 64, 3)}, IncompatibleHandle, "namespace"),
    ],
)
@COLOURS
async def test_nothing_to_join_is_a_typed_error(
    broker: KVBroker, state: dict[str, Any], error: type[AAFlowError], message: str, colour: str
) -> None:
    node = compose_node(broker, reads="sources", writes="context")
    with pytest.raises(error, match=message):
        await run(node, state, colour)


def test_children_of_two_models_or_tenants_are_accepted_by_the_channel_and_refused_by_the_node(
    broker: KVBroker, docs: dict[str, KVHandle], open_broker: Callable[..., KVBroker]
) -> None:
    engine = TransformersEngine(broker.engine.model, broker.engine.tokenizer, name="tiny-llama", tenant="other")
    tenant = KVBroker.open(engine, pool_bytes=4 << 20)
    with tenant:
        for other in (open_broker("qwen3"), tenant):
            foreign = other.prefill(TEXTS["oslo"], label="foreign").handle
            builder: StateGraph[Any] = StateGraph(State)
            builder.add_node("ours", lambda state: {"sources": docs["rome"]})
            builder.add_node("theirs", lambda state, foreign=foreign: {"sources": foreign})
            builder.add_node("join", compose_node(broker, reads="sources", writes="context"))
            for name in ("ours", "theirs"):
                builder.add_edge(START, name)
            builder.add_edge(["ours", "theirs"], "join")
            graph = builder.compile(checkpointer=InMemorySaver(serde=handle_serializer()))
            with pytest.raises(IncompatibleHandle):
                graph.invoke({}, thread())
            values = graph.get_state(thread()).values
            assert set(values["sources"].kv_children) == {docs["rome"], foreign}
            assert "context" not in values


def test_segments_that_repeat_are_joined_as_often_as_they_are_named(
    broker: KVBroker, docs: dict[str, KVHandle]
) -> None:
    made = compose_node(broker, reads=["first", "second", "first"], writes="context", rung="legolink")
    result = made.invoke({"first": docs["oslo"], "second": docs["rome"]})["context"]
    assert result == broker.compose([docs["oslo"], docs["rome"], docs["oslo"]], rung="legolink").handle
