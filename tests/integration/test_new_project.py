"""The project that ``aaflow new`` writes, run by a real ``langgraph dev`` as it is, on the demo model, without the network."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aaflow_langgraph.cli import main
from tests.dev_server import DevServer, needs_langgraph_dev
from tests.real import real_cache  # noqa: F401

pytestmark = [pytest.mark.slow, needs_langgraph_dev]


@pytest.fixture
def server(tmp_path: Path, real_cache: None) -> Iterator[DevServer]:
    assert main(["new", str(tmp_path / "fjords")]) == 0
    # Nothing answers at this address: what wants to go out fails.
    nowhere = "http://127.0.0.1:9"
    server = DevServer(tmp_path / "fjords", HTTPS_PROXY=nowhere, HTTP_PROXY=nowhere, NO_PROXY="127.0.0.1")
    try:
        server.start()
        yield server
        server.stop()
    finally:
        server.kill()


def test_a_new_project_starts_offline_and_answers_streams_and_shows_its_kv(server: DevServer) -> None:
    client = server.client
    assert sorted(assistant["graph_id"] for assistant in client.assistants.search()) == ["chat", "documents"]

    thread = client.threads.create()["thread_id"]
    asked: Any = {"question": "In which city does the review take place?", "ask_me_first": True}
    waiting: Any = client.runs.wait(thread, "documents", input=asked)
    assert waiting["__interrupt__"][0]["value"] == "Shall I answer?"
    done: Any = client.runs.wait(thread, "documents", command={"resume": "yes"})
    assert "Oslo" in done["answer"]
    assert done["usage"]["num_reused"] == done["docs"]["kv_tokens"] > 300

    # Chat mode: a state of messages, streamed token by token; the second turn goes on from the first.
    thread = client.threads.create()["thread_id"]
    reused = []
    for said in ("Name a city in Norway.", "And another one."):
        message: Any = {"messages": [{"role": "user", "content": said}]}
        parts = list(client.runs.stream(thread, "chat", input=message, stream_mode=["messages-tuple", "values"]))
        chunks: list[Any] = [part.data[0] for part in parts if part.event == "messages"]
        state: Any = client.threads.get_state(thread)["values"]
        answer = state["messages"][-1]
        assert len(chunks) > 2
        assert "".join(chunk["content"] for chunk in chunks) == answer["content"] != ""
        reused.append(answer["usage_metadata"]["input_token_details"]["cache_read"])
    assert reused[1] > reused[0] + 10
    (handle,) = state["kv_lineages"].values()
    assert handle["kv_id"] == answer["response_metadata"]["kv"]["kv_id"], (
        "the conversation's handle is in the state, too"
    )

    with urllib.request.urlopen(f"{server.url}/kv") as page:
        assert page.status == 200
        assert "<html" in page.read().decode()
    assert server.complaints() == []
