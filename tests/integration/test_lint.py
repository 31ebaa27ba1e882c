"""``aaflow lint`` and ``assert_prefix_stable``: what they find in planted apps, and nothing in clean ones."""

from __future__ import annotations

import datetime
import importlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from langgraph.graph import START, MessagesState, StateGraph
from typing_extensions import TypedDict

from aaflow_langgraph import (
    KVBroker,
    KVChannel,
    KVCompose,
    KVComposite,
    KVHandle,
    Sampling,
    cli,
    compose_node,
    generate_node,
    prefill_node,
)
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.explain import Cause
from aaflow_langgraph.lint.app import GO_ON, QUESTION, load_app, runnable_graph, turns_of
from aaflow_langgraph.lint.check import find_breaks
from aaflow_langgraph.testing.prefix import assert_prefix_stable
from tests import planted, templates, tiny
from tests.planted import PLANTED, App, Open, open_one  # noqa: F401

# ---------------------------------------------------------------- what is found


@pytest.mark.parametrize("cause", sorted(PLANTED))
def test_each_planted_cause_is_found_at_its_node(cause: Cause, open_one: Open) -> None:
    make, node = PLANTED[cause]
    app = make(open_one)
    found = find_breaks(app.graph, app.turns)
    assert {one.cause for one in found} == {cause}
    assert node in {one.node for one in found}
    assert all(one.why and one.mend and 0 < one.num_lost <= one.num_context for one in found)


@pytest.mark.parametrize(
    "make", [planted.reads_and_answers, planted.talks, planted.speaks, planted.uses_tools, planted.stamps_its_questions]
)
def test_nothing_is_found_in_a_clean_app(make: Callable[[Open], App], open_one: Open) -> None:
    app = make(open_one)
    assert find_breaks(app.graph, app.turns, answers=app.answers) == ()
    assert find_breaks(app.graph, answers=app.answers) == ()


def test_nothing_is_found_in_the_example_of_the_repository(open_one: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    example = importlib.import_module("retrieval_planning_reasoning")
    broker = open_one(planted.engine())
    graph = example.handle_graph(broker, lambda state: planted.DOCS + state["question"], deterministic=False)
    assert find_breaks(graph, [{"question": "Which city?"}, {"question": "Which river?"}]) == ()


class Joining(TypedDict):
    sources: Annotated[KVHandle | KVComposite, KVCompose]
    context: Annotated[KVHandle, KVChannel]
    answer: str


@pytest.mark.parametrize("rung", ["auto", "legolink"])
def test_nothing_is_found_where_handles_are_joined(rung: Any, open_one: Open) -> None:
    broker = open_one(planted.engine())
    few = Sampling(max_tokens=2)
    builder = StateGraph(Joining)
    for name in ("manual", "ticket"):
        builder.add_node(name, prefill_node(broker, f"The {name} says: {planted.DOCS}", writes="sources"))
        builder.add_edge(START, name)
    builder.add_node("join", compose_node(broker, reads="sources", writes="context", rung=rung))
    builder.add_node("answer", generate_node(broker, "Why?", reads="context", text_to="answer", sampling=few))
    builder.add_edge(["manual", "ticket"], "join")
    builder.add_edge("join", "answer")
    assert find_breaks(builder) == ()


def test_tools_bound_in_an_order_that_is_drawn_are_found_on_the_chat_model(open_one: Open) -> None:
    def drawn(_: int) -> list[Any]:
        tools = [planted.add, planted.subtract]
        random.shuffle(tools)
        return tools

    app = planted.uses_tools(open_one, drawn)
    (found,) = find_breaks(app.graph, answers=app.answers)
    assert (found.node, found.cause) == ("agent", "tools")


def test_a_chat_template_that_tells_the_date_is_found(open_one: Open) -> None:
    """Llama 3.1 and others write it into the system turn."""
    dated = tiny.CHATML.replace(
        "{% for message in messages %}",
        "{{ '<|im_start|>system\nToday is ' + strftime_now('%d %b %Y') + '. ' + 'Be kind. ' * 4 + '<|im_end|>\n' }}"
        "{% for message in messages %}",
        1,
    )
    for app in (
        planted.one_agent(open_one(planted.engine(dated)), lambda _: planted.SYSTEM),
        planted.speaks(open_one, made=lambda: planted.engine(dated)),
    ):
        (found,) = find_breaks(app.graph)
        assert (found.node, found.cause) == ("agent", "volatile")


def test_reasoning_that_the_template_drops_is_found_without_a_word_of_the_app(open_one: Open) -> None:
    """The stand-in for a model thinks where the template knows what thinking is."""
    app = planted.uses_tools(open_one, template=templates.THINKING)
    (found,) = find_breaks(app.graph)
    assert (found.node, found.cause) == ("agent", "think")


def test_an_answer_that_is_passed_on_as_text_is_found(open_one: Open) -> None:
    app = planted.speaks(open_one, lambda message: message.text)
    (found,) = find_breaks(app.graph, answers=["The cities there."])
    assert (found.cause, found.seen) == ("retokenised", "run")


def test_what_is_decided_when_a_graph_is_made_is_found_between_two_starts(open_one: Open) -> None:
    broker = open_one(planted.engine())

    def make() -> Any:
        session = f"Session of {datetime.datetime.now():%d %B %Y}. {planted.SYSTEM}"
        return planted.one_agent(broker, lambda _: session).graph

    (found,) = find_breaks(make)
    assert (found.node, found.cause, found.seen) == ("agent", "volatile", "start")
    assert find_breaks(make()) == ()  # made once: it stays as it is


def test_a_long_last_turn_that_begins_with_the_time_is_found_and_one_that_ends_with_it_is_not(open_one: Open) -> None:
    broker = open_one(planted.engine())

    def graph(prompt: str) -> Any:
        def moment(state: planted.Reading) -> dict[str, str]:
            return {"answer": time.strftime("%H:%M")}

        builder = StateGraph(planted.Reading)
        builder.add_node("clock", moment)
        builder.add_node("ask", generate_node(broker, prompt, writes="docs", sampling=Sampling(max_tokens=2)))
        builder.add_edge(START, "clock")
        builder.add_edge("clock", "ask")
        return builder.compile()

    (found,) = find_breaks(graph("At {answer}: " + planted.DOCS + "{question}"))
    assert (found.node, found.cause) == ("ask", "volatile")
    assert find_breaks(graph(planted.DOCS + "{question} It is {answer}.")) == ()


# ---------------------------------------------------------------- what a look leaves behind: nothing


def test_a_dry_run_neither_reads_nor_writes_what_the_broker_really_holds(open_one: Open) -> None:
    app = planted.talks(open_one)
    (broker,) = app.brokers
    kept = broker.prefill("Berlin is the capital of Germany.").handle
    before = (broker.stats(), broker.journal.entries(), dict(vars(broker)))
    assert find_breaks(app.graph) == ()
    assert (broker.stats(), broker.journal.entries(), dict(vars(broker))) == before
    real = broker.generate("Which city?", parent=kept, sampling=Sampling(max_tokens=4))
    assert real.usage.num_reused == kept.kv_tokens
    with KVBroker.open(broker.engine, pool_bytes=8 << 20) as cold:
        assert cold.generate("Which city?", parent=cold.prefill("Berlin is the capital of Germany.").handle,
                             sampling=Sampling(max_tokens=4)).token_ids == real.token_ids  # fmt: skip


def test_handles_that_an_app_has_made_already_are_known_in_a_dry_run(open_one: Open) -> None:
    broker = open_one(planted.engine())
    docs = broker.prefill(planted.DOCS).handle
    builder = StateGraph(planted.Reading)
    builder.add_node("reason", generate_node(broker, "{question}", reads="docs", text_to="answer"))
    builder.add_edge(START, "reason")
    assert find_breaks(builder, {"docs": docs, "question": "Which city?"}) == ()


def test_the_real_clock_and_the_real_dice_come_back_also_after_an_error(open_one: Open) -> None:
    seen: list[datetime.datetime] = []

    def fails(state: MessagesState) -> dict[str, Any]:
        from datetime import datetime as imported_late

        seen.append(imported_late.now())
        raise LookupError("of the app")

    builder = StateGraph(MessagesState)
    builder.add_node("fails", fails)
    builder.add_edge(START, "fails")
    open_one(planted.engine())
    names = (datetime, time, random, sys.modules["datetime"], sys.modules["time"], sys.modules["random"])
    with pytest.raises(LookupError, match="of the app"):
        find_breaks(builder)
    assert names == (datetime, time, random, sys.modules["datetime"], sys.modules["time"], sys.modules["random"])
    assert isinstance(seen[0], datetime.datetime)
    assert abs(seen[0].timestamp() - time.time()) < 3600


# ---------------------------------------------------------------- in tests of apps


def test_assert_prefix_stable_fails_with_the_place_and_the_mend(open_one: Open) -> None:
    app = planted.dated(open_one)
    with pytest.raises(AssertionError) as failed:
        assert_prefix_stable(app.graph, app.turns)
    message = str(failed.value)
    assert message.startswith("1 place is not append-only")
    assert "agent: timestamp or id early in the prompt (volatile)" in message
    assert "before '<|im_start|>system\\nNow it is '" in message
    assert_prefix_stable(app.graph, app.turns, ignore={"volatile"})


def test_the_fixture_of_the_plug_in_is_the_same_assertion(prefix_stable: Callable[..., None], open_one: Open) -> None:
    prefix_stable(planted.talks(open_one).graph)
    assert prefix_stable is assert_prefix_stable


async def test_a_test_with_a_running_loop_may_ask_too(open_one: Open) -> None:
    assert_prefix_stable(planted.talks(open_one).graph)


def test_bad_input_is_refused_by_name(open_one: Open) -> None:
    app = planted.talks(open_one)
    for wrong in (None, "graph", 3, lambda needed: app.graph):
        with pytest.raises(ConfigError, match="a LangGraph graph is needed"):
            assert_prefix_stable(wrong)
    for inputs in ("text", [], [1], 3):
        with pytest.raises(ConfigError, match="inputs are one input"):
            assert_prefix_stable(app.graph, inputs)
    with pytest.raises(ConfigError, match="there are none, volatile, tools"):
        assert_prefix_stable(app.graph, ignore=["dates"])  # type: ignore[list-item]
    builder = StateGraph(MessagesState)
    builder.add_node("silent", lambda state: {})
    builder.add_edge(START, "silent")
    with pytest.raises(ConfigError, match="no broker was asked for anything"):
        assert_prefix_stable(builder)


# ---------------------------------------------------------------- the command


def test_an_app_is_named_by_file_or_module_and_what_is_missing_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "lint_app.py").write_text("import langgraph.graph as g\ngraph = g.StateGraph(dict)\nother = 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_app("lint_app.py:graph"), StateGraph)
    assert isinstance(load_app("lint_app:graph"), StateGraph)
    with pytest.raises(ConfigError, match="its graphs are: graph"):
        load_app("lint_app.py:missing")
    for wrong, what in (
        ("lint_app", "names no app"),
        (":graph", "names no app"),
        ("lint_app.py:a b", "names no app"),
        ("nowhere.py:graph", "there is no file"),
        ("no_such_module_here:graph", "there is no module"),
    ):
        with pytest.raises(ConfigError, match=what):
            load_app(wrong)
    with pytest.raises(ConfigError, match="got int"):
        runnable_graph(load_app("lint_app:other"))


def test_inputs_are_made_up_from_the_schema_or_taken_turn_by_turn(open_one: Open) -> None:
    talk = runnable_graph(planted.talks(open_one).graph)
    assert [turn["messages"][0]["content"] for turn in turns_of(talk, None)] == [QUESTION, GO_ON]
    reading = runnable_graph(planted.reads_and_answers(open_one).graph)
    assert [turn["question"] for turn in turns_of(reading, None)] == [QUESTION, QUESTION]
    assert turns_of(talk, {"messages": []}) == [{"messages": []}] * 2
    assert turns_of(talk, [{"a": 1}]) == [{"a": 1}]


APP = """
from datetime import date
from langchain_core.messages import SystemMessage
from langgraph.graph import START, MessagesState, StateGraph
from aaflow_langgraph import KVBroker
from aaflow_langgraph.chat.model import KVChatModel
print("loaded")  # stdout is the command's own
broker = KVBroker.open(MODEL, index="redis://nowhere.invalid", device="cuda", disk="/no/such/place")
model = KVChatModel(broker, max_tokens=20)
SYSTEM = f"Today is {date.today():%A, %d %B %Y}. You are a helpful assistant who answers in one short sentence."
TOOLS = {"search", "add", "translate", "look_up", "subtract"}
def tool(name):
    return {"type": "function", "function": {"name": name, "description": name, "parameters": {"type": "object"}}}
def agent(state):
    return {"messages": [model.invoke([SystemMessage(SYSTEM), *state["messages"]])]}
def tooled(state):
    bound = model.bind_tools([tool(name) for name in TOOLS])
    return {"messages": [bound.invoke(state["messages"])]}
builder = StateGraph(MessagesState)
builder.add_sequence([("agent", agent), ("tooled", tooled)])
builder.add_edge(START, "agent")
graph = builder.compile()
"""


def lint(*arguments: str) -> subprocess.CompletedProcess[str]:
    main = "import sys; from aaflow_langgraph.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", main, "lint", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_the_command_starts_an_app_twice_without_its_weights_and_finds_what_loading_decides(tmp_path: Path) -> None:
    """Neither the index, nor the device, nor the disk of the app is there; a date and the order of a set differ by start."""
    model = tiny.save(tmp_path / "model", template=templates.HERMES)
    (model / "model.safetensors").unlink()
    (tmp_path / "app.py").write_text(f"MODEL = {str(model)!r}\n{APP}")
    done = lint(f"{tmp_path / 'app.py'}:graph", "--json")
    assert done.returncode == 1, done.stderr
    document = json.loads(done.stdout)
    assert (document["schema"], document["name"], document["nodes"]) == (1, "lint", ["agent", "tooled"])
    assert document["num_requests"] == 4
    found = {(one["node"], one["cause"], one["seen"]) for one in document["findings"]}
    assert found == {("agent", "volatile", "start"), ("tooled", "tools", "start")}


@pytest.mark.slow
def test_what_an_app_raises_is_shown_with_its_own_traceback(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def deep():\n    raise LookupError('no key in the vault')\ndeep()\n")
    done = lint(f"{tmp_path / 'broken.py'}:graph")
    assert done.returncode == 2
    assert "in deep" in done.stderr
    assert "LookupError: no key in the vault" in done.stderr
    assert "broken.py:graph ended with status 1" in done.stderr


def test_options_of_the_command_are_checked_before_anything_is_started(capsys: Any) -> None:
    for arguments, what in (
        (["--input", "{"], "--input is no JSON"),
        (["--ignore", "dates"], "ignore takes names of causes"),
    ):
        assert cli.main(["lint", "nowhere.py:graph", *arguments]) == 2
        assert what in capsys.readouterr().err
