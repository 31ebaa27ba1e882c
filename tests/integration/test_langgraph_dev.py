"""``langgraph dev``, as Studio drives it: a ``KVCheckpointSaver`` is the configured checkpointer, and blocking calls are errors."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph_sdk import get_sync_client
from langgraph_sdk.client import SyncLangGraphClient
from langgraph_sdk.errors import NotFoundError

from tests import tiny
from tests.servers import until

_MISSING = [name for name in ("langgraph_cli", "langgraph_api") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_MISSING), reason=f"needs {', '.join(_MISSING)}: pip install 'langgraph-cli[inmem]'"),
]

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
""",
    "studio.py": """
import asyncio
import time
from dataclasses import asdict
from typing import Annotated, TypedDict

from blockbuster import BlockingError
from langgraph.graph import START, StateGraph
from langgraph.types import interrupt
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from aaflow_langgraph import KVChannel, KVCheckpointSaver, KVHandle, Sampling, generate_node, prefill_node
from kv import broker


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


def checkpointer():
    return KVCheckpointSaver.local("checkpoints", broker)


async def counters(request):
    return JSONResponse(asdict(broker.stats()))


app = Starlette(routes=[Route("/kv", counters)])
""",
}


class DevServer:
    """``langgraph dev`` on a project."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [
            str(Path(sys.executable).with_name("langgraph")),
            "dev",
            "--config",
            "langgraph.json",
            "--no-browser",
        ]
        command += ["--no-reload", "--n-jobs-per-worker", "4", "--host", "127.0.0.1", "--port", str(port)]
        settings = {"LANGSMITH_TRACING": "false", "LANGGRAPH_CLI_NO_ANALYTICS": "1", "LOG_COLOR": "false"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        until(self._answers, f"the server starts; see {self.log}", timeout_s=60)
        self.client = get_sync_client(url=self.url)

    def stop(self) -> None:
        """As Ctrl-C does."""
        assert self._process is not None
        self.client.http.client.close()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(timeout=30)

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def counters(self) -> dict[str, int]:
        with urllib.request.urlopen(f"{self.url}/kv") as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def complaints(self) -> list[str]:
        """Errors, and warnings of ours, in the server's log."""
        lines = re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(errors="replace")).splitlines()
        return [
            line for line in lines if re.search(r"\[(error|critical) |Traceback|[Bb]locking|aaflow_langgraph\]", line)
        ]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text(errors="replace")
        try:
            with urllib.request.urlopen(f"{self.url}/ok"):
                return True
        except (urllib.error.URLError, ConnectionError):
            return False


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


def test_a_restarted_server_prefills_nothing_again(dev: DevServer, client: SyncLangGraphClient) -> None:
    thread = new_thread(client)
    ask(client, thread, "What has Finland?", place="Finland", asks=True)
    docs = client.threads.get_state(thread)["values"]["docs"]
    dev.stop()
    dev.start()
    assert dev.counters()["num_prefilled_tokens"] == 0
    done = dev.client.runs.wait(thread, "asking", command={"resume": "yes"})
    assert done["docs"] == docs
    after = dev.counters()
    assert after["num_recomputed_tokens"] == 0
    assert after["num_prefilled_tokens"] < 60 < docs["kv_tokens"]
    assert after["num_fetches"] > 0
