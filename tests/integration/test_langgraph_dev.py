"""``langgraph dev``, as Studio drives it: a ``KVCheckpointSaver`` is the configured checkpointer, and blocking calls are errors."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import NotFoundError

from tests import tiny
from tests.dev_server import DevServer, needs_langgraph_dev
from tests.servers import until

pytestmark = [pytest.mark.slow, needs_langgraph_dev]

FILES = {
    "langgraph.json": json.dumps(
        {
            "dependencies": ["."],
            "graphs": {"asking": "./studio.py:graph"},
            "checkpointer": {"path": "./studio.py:checkpointer"},
            "http": {"app": "./studio.py:app"},
        }
    ),
    # The server executes a file anew for each of its three uses; a module that they import exists once.
    "kv.py": """
from aaflow_langgraph import KVBroker

broker = KVBroker.open("model", pool_bytes=64 << 20)
savers = []
""",
    "studio.py": """
import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Annotated

from blockbuster import BlockingError
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route
from typing_extensions import TypedDict

from aaflow_langgraph import KVChannel, KVCheckpointSaver, KVHandle, Sampling, generate_node, prefill_node
from aaflow_langgraph.studio import inspector_app
from kv import broker, savers


class State(TypedDict, total=False):
    docs: Annotated[KVHandle, KVChannel]
    chat: Annotated[KVHandle, KVChannel]
    place: str
    question: str
    answer: str
    asks: bool
    approved: str


async def documents(state):
    await asyncio.sleep(0)
    return f"{state.get('place', 'Norway')} has fjords, and many museums. " * 8


async def confirm(state):
    if state["question"] == "Who waits?":
        await asyncio.sleep(600)
    if state["question"] == "Who is watched?":
        try:
            time.sleep(0)
        except BlockingError:
            return {"approved": "blocking calls are errors"}
    return {"approved": interrupt("go on?")} if state.get("asks") else {}


short = Sampling(max_tokens=6)
builder = StateGraph(State)
builder.add_node("read", prefill_node(broker, documents, writes="docs"))
builder.add_node("confirm", confirm)
builder.add_node(
    "answer", generate_node(broker, "{question}", reads="docs", writes="chat", text_to="answer", sampling=short)
)
builder.add_edge(START, "read")
builder.add_edge("read", "confirm")
builder.add_edge("confirm", "answer")
graph = builder.compile()


@asynccontextmanager
async def checkpointer():
    async with KVCheckpointSaver.local("checkpoints", broker) as saver:
        savers.append(saver)
        yield saver


async def counters(request):
    kept = await asyncio.to_thread(savers[-1].stats)
    beside = {"num_recipes": kept.manifest.num_recipes, "kept_bytes": kept.tensor_bytes}
    return JSONResponse(asdict(broker.stats()) | beside)


inspector = inspector_app(broker, "checkpoints", prefix="")
app = Starlette(routes=[Route("/kv", counters), Mount("/inspector", inspector)])
""",
}


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DevServer]:
    folder = tmp_path_factory.mktemp("studio")
    tiny.save(folder / "model")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    server = DevServer(folder)
    try:
        server.start()
        yield server
        server.stop()
    finally:
        server.kill()


@pytest.fixture
def client(dev: DevServer) -> Iterator[SyncLangGraphClient]:
    yield dev.client
    assert dev.complaints() == []


def ask(client: SyncLangGraphClient, thread_id: str, question: str, **values: Any) -> dict[str, Any]:
    answer = client.runs.wait(thread_id, "asking", input={"question": question, **values})
    assert isinstance(answer, dict)
    return answer


def new_thread(client: SyncLangGraphClient) -> str:
    return client.threads.create()["thread_id"]


def test_the_detector_of_blocking_calls_is_on_and_tokens_stream(client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    assert ask(client, thread, "Who is watched?")["approved"] == "blocking calls are errors"
    parts = list(
        client.runs.stream(
            thread, "asking", input={"question": "What is new?"}, stream_mode=["messages-tuple", "values"]
        )
    )
    streamed = [part.data[0]["content"] for part in parts if part.event == "messages"]
    assert len(streamed) > 1
    assert "".join(streamed) == client.threads.get_state(thread)["values"]["answer"]


def test_history_replay_fork_and_an_edit(dev: DevServer, client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    first = ask(client, thread, "What has Norway?")
    second = ask(client, thread, "And Sweden?")
    state = client.threads.get_state(thread)
    assert state["values"] == second
    assert state["values"]["docs"]["kv_label"] == "docs", "handles are objects that can be read"
    assert state["values"]["docs"]["kv_tokens"] > 200

    history = client.threads.get_history(thread, limit=50)
    done = [found for found in history if found["next"] == []]
    assert [found["values"] for found in done] == [second, first]
    before = next(
        found for found in history if found["next"] == ["answer"] and found["values"]["question"] != "And Sweden?"
    )

    prefilled = dev.counters()["num_prefilled_tokens"]
    replayed = client.runs.wait(thread, "asking", input=None, checkpoint_id=before["checkpoint"]["checkpoint_id"])
    assert replayed == first
    assert dev.counters()["num_prefilled_tokens"] - prefilled < 40

    forked = client.threads.update_state(
        thread, {"question": "And Iceland?"}, checkpoint_id=before["checkpoint"]["checkpoint_id"]
    )
    other = client.runs.wait(thread, "asking", input=None, checkpoint_id=forked["checkpoint"]["checkpoint_id"])
    assert other["docs"] == first["docs"]
    assert other["chat"] != first["chat"]

    client.threads.update_state(thread, {"docs": first["chat"]}, as_node="read")
    edited = client.runs.wait(thread, "asking", input=None)
    assert edited["docs"]["kv_id"] == first["chat"]["kv_id"], "a handle that came back as JSON is a handle again"
    assert edited["chat"]["kv_tokens"] > first["chat"]["kv_tokens"]


def test_studio_gets_a_schema_in_which_handles_are_objects(client: SyncLangGraphClient) -> None:
    (assistant,) = client.assistants.search()
    schemas = client.assistants.get_schemas(assistant["assistant_id"])
    state: Any = schemas["state_schema"]
    handle = state["$defs"]["KVHandle"]
    assert state["properties"]["docs"]["$ref"] == "#/$defs/KVHandle"
    assert {name: field["type"] for name, field in handle["properties"].items()} == {
        "kv_id": "string",
        "kv_namespace": "string",
        "kv_tokens": "integer",
        "kv_exact": "boolean",
        "kv_label": "string",
        "kv_preview": "string",
    }
    assert handle["required"] == ["kv_id", "kv_namespace", "kv_tokens"]


def garbage_for(handle: dict[str, Any]) -> list[tuple[Any, str]]:
    """What can be typed into a JSON editor in place of a handle, and what is said of it."""
    return [
        ("garbage", "a handle was expected, got str"),
        (7, "a handle was expected, got int"),
        ([handle], "a handle was expected, got list"),
        ({}, "a dict that is no handle: missing kv_id, kv_namespace, kv_tokens, 0 unknown fields"),
        ({**handle, "secret": "s3cr3t"}, "a dict that is no handle: missing nothing, 1 unknown fields"),
        ({**handle, "kv_id": "../../etc/passwd"}, "kv_id must be 64 lower-case hex digits"),
        ({**handle, "kv_tokens": -1}, "kv_tokens must be an int in [1, 2147483648)"),
        ({**handle, "kv_tokens": True}, "kv_tokens must be an int in [1, 2147483648)"),
        ({**handle, "kv_label": "x" * 10_000}, "kv_label must be Unicode text of at most 64 characters"),
    ]


def test_garbage_in_the_json_editor_keeps_the_handle_and_says_why(dev: DevServer, client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    first = ask(client, thread, "What has Norway?")
    for garbage, reason in garbage_for(first["docs"]):
        client.threads.update_state(thread, {"docs": garbage}, as_node="read")
        assert client.threads.get_state(thread)["values"]["docs"] == first["docs"]
        said = "\n".join(dev.forgive())
        assert f"state key 'docs' keeps {first['docs']['kv_id'][:12]}, the value written is not taken: {reason}" in said
        assert not re.search("Traceback|s3cr3t|passwd", said)
    client.threads.update_state(thread, {"docs": None}, as_node="read")
    again = client.runs.wait(thread, "asking", input=None)
    assert (again["docs"], again["chat"]) == (first["docs"], first["chat"])
    client.threads.update_state(thread, {"docs": {"__overwrite__": None}}, as_node="read")
    assert "docs" not in client.threads.get_state(thread)["values"]


@pytest.mark.parametrize(
    ("forgery", "error"),
    [
        ({"kv_id": "ab" * 32}, "RecipeMissing"),
        ({"kv_namespace": "cd" * 32}, "IncompatibleHandle"),
        ({"kv_tokens": 3}, "IncompatibleHandle"),
    ],
    ids=["id", "namespace", "count"],
)
def test_a_forged_handle_fails_its_run_by_name_and_the_thread_goes_on_from_a_good_one(
    forgery: dict[str, Any], error: str, dev: DevServer, client: SyncLangGraphClient
) -> None:
    thread = new_thread(client)
    first = ask(client, thread, "What has Norway?")
    client.threads.update_state(thread, {"docs": {**first["docs"], **forgery}}, as_node="read")
    for _ in range(2):
        with pytest.raises(Exception, match=error):
            client.runs.wait(thread, "asking", input=None)
    assert client.threads.get_state(thread)["values"]["answer"] == first["answer"], "the state can be read"
    assert len(client.threads.get_history(thread)) > 4
    client.threads.update_state(thread, {"docs": first["docs"]}, as_node="read")
    healed = client.runs.wait(thread, "asking", input=None)
    assert (healed["docs"], healed["chat"]) == (first["docs"], first["chat"])
    assert error in "\n".join(dev.forgive())


def test_an_interrupt_is_resumed_on_the_kv_of_before(dev: DevServer, client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    ask(client, thread, "What is there to see?", asks=True, place="Oslo")
    waiting = client.threads.get_state(thread)
    assert waiting["next"] == ["confirm"]
    assert waiting["tasks"][0]["interrupts"][0]["value"] == "go on?"
    done = client.runs.wait(thread, "asking", command={"resume": "yes"})
    assert done["approved"] == "yes"
    assert done["docs"] == waiting["values"]["docs"]
    assert done["chat"]["kv_tokens"] > done["docs"]["kv_tokens"]


def test_threads_run_at_once_and_a_copied_one_outlives_its_source(client: SyncLangGraphClient) -> None:
    threads = [new_thread(client) for _ in range(3)]
    runs = [
        client.runs.create(thread, "asking", input={"question": "What is there?", "place": place})
        for thread, place in zip(threads, ("Bergen", "Bergen", "Tromsø"), strict=True)
    ]
    one, same, other = (client.runs.join(thread, run["run_id"]) for thread, run in zip(threads, runs, strict=True))
    assert one["chat"]["kv_id"] == same["chat"]["kv_id"] != other["chat"]["kv_id"]
    copied = client.http.post(f"/threads/{threads[0]}/copy", json=None)["thread_id"]
    for thread in threads:
        client.threads.delete(thread)
        with pytest.raises(NotFoundError):
            client.threads.get_state(thread)
    assert client.threads.get_state(copied)["values"] == one
    assert ask(client, copied, "What is there?", place="Bergen") == one


def test_a_run_that_is_rolled_back_leaves_the_thread_as_it_was(client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    first = ask(client, thread, "What has Iceland?", place="Iceland")
    run = client.runs.create(thread, "asking", input={"question": "Who waits?", "place": "Greenland"})
    until(lambda: client.threads.get_state(thread)["next"] == ["confirm"], "the run waits in its second node")
    client.runs.cancel(thread, run["run_id"], wait=True, action="rollback")
    until(lambda: client.threads.get_state(thread)["values"] == first, "the run's checkpoints are deleted")
    assert ask(client, thread, "What has Iceland?", place="Iceland") == first


def test_the_inspector_shows_a_run_and_refuses_other_pages_whose_origin_the_server_allows(
    dev: DevServer, client: SyncLangGraphClient
) -> None:
    def asked(name: str, **parameters: str) -> Any:
        return httpx.get(f"{dev.url}/inspector/api/{name}", params=parameters).raise_for_status().json()

    thread = new_thread(client)
    done = ask(client, thread, "What has Denmark?", place="Denmark")
    assert "KV inspector" in httpx.get(f"{dev.url}/inspector/").text
    nodes = {node["kv_id"]: node for node in asked("graph", thread=thread)["nodes"]}
    assert nodes[done["chat"]["kv_id"]]["above"] == done["docs"]["kv_id"]
    assert nodes[done["chat"]["kv_id"]]["node"] == "answer"
    newest, *_ = asked("thread", id=thread)["checkpoints"]
    assert {handle["kv_id"] for handle in newest["handles"]} == {done[key]["kv_id"] for key in ("docs", "chat")}
    elsewhere = httpx.get(f"{dev.url}/inspector/api/overview", headers={"Origin": "https://example.org"})
    assert elsewhere.status_code == 403


def test_a_restarted_server_prefills_nothing_again_and_keeps_no_byte_of_deleted_threads(
    dev: DevServer, client: SyncLangGraphClient
) -> None:
    thread = new_thread(client)
    ask(client, thread, "What has Finland?", place="Finland", asks=True)
    docs = client.threads.get_state(thread)["values"]["docs"]
    dev.stop()
    with closing(sqlite3.connect(dev.folder / "checkpoints" / "checkpoints.sqlite")) as database:
        (step_bytes,) = database.execute(
            "SELECT MAX(LENGTH(checkpoint) + LENGTH(metadata)) FROM checkpoints"
        ).fetchone()
    assert step_bytes < 5000
    dev.start()
    assert dev.counters()["num_prefilled_tokens"] == 0
    done = dev.client.runs.wait(thread, "asking", command={"resume": "yes"})
    assert done["docs"] == docs
    after = dev.counters()
    assert after["num_recomputed_tokens"] == 0
    assert after["num_prefilled_tokens"] + after["num_decoded_tokens"] <= done["chat"]["kv_tokens"] - docs["kv_tokens"]
    assert after["num_fetches"] > 0
    undisturbed = ask(dev.client, new_thread(dev.client), "What has Finland?", place="Finland")
    assert (done["chat"], done["answer"]) == (undisturbed["chat"], undisturbed["answer"])

    assert dev.counters()["kept_bytes"] > 0
    for found in dev.client.threads.search(limit=1000):
        dev.client.threads.delete(found["thread_id"])
    counters = dev.counters()
    assert (counters["num_recipes"], counters["kept_bytes"]) == (0, 0)
    (beside,) = (dev.folder / "checkpoints").glob("*.kv")
    assert list(beside.rglob("*.safetensors")) == []
