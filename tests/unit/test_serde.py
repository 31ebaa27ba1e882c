"""Handles through LangGraph's serialisers: default, explicit allow-list, strict."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde import jsonplus
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.types import Send

from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.graph.channels import KVChannel
from aaflow_langgraph.graph.compose_channel import KVCompose
from aaflow_langgraph.graph.serde import MSGPACK_ALLOWLIST, handle_serializer
from aaflow_langgraph.handle import KVHandle

COMPOSITE = KVComposite.of({"one": KVHandle("a" * 64, "b" * 64, 1), "two": KVHandle("c" * 64, "b" * 64, 2)}, r=0.5)
HANDLE = KVHandle("a" * 64, "b" * 64, 4096, False, "docs" * 16, "wörds … ümlauts" * 5)


@dataclass
class OwnState:
    """A state type of the application."""

    question: str


SHAPES = [HANDLE, {"docs": HANDLE}, [HANDLE, {"nested": (HANDLE,)}], Send("node", {"docs": HANDLE})]


def handles_in(value: Any) -> list[Any]:
    if isinstance(value, Send):
        return handles_in(value.arg)
    if isinstance(value, dict) and "kv_id" not in value:
        return [handle for item in value.values() for handle in handles_in(item)]
    if isinstance(value, (list, tuple)):
        return [handle for item in value for handle in handles_in(item)]
    return [value]


@pytest.mark.parametrize("shape", SHAPES, ids=["bare", "dict", "nested", "send"])
@pytest.mark.parametrize(
    "serializer",
    [JsonPlusSerializer(), JsonPlusSerializer(allowed_msgpack_modules=MSGPACK_ALLOWLIST), handle_serializer()],
    ids=["default", "allow-list", "helper"],
)
def test_handles_come_back_as_handles(serializer: JsonPlusSerializer, shape: Any) -> None:
    restored = serializer.loads_typed(serializer.dumps_typed(shape))
    found = handles_in(restored)
    assert found == handles_in(shape)
    for handle in found:
        assert isinstance(handle, KVHandle)
        assert (handle.kv_label, handle.kv_preview) == (HANDLE.kv_label, HANDLE.kv_preview)


@pytest.mark.parametrize(
    "serializer",
    [JsonPlusSerializer(), JsonPlusSerializer(allowed_msgpack_modules=MSGPACK_ALLOWLIST), handle_serializer()],
    ids=["default", "allow-list", "helper"],
)
def test_composites_come_back_as_composites_with_their_labels(serializer: JsonPlusSerializer) -> None:
    restored = serializer.loads_typed(serializer.dumps_typed({"sources": [COMPOSITE]}))["sources"][0]
    assert isinstance(restored, KVComposite)
    assert restored == COMPOSITE
    assert restored.to_dict() == COMPOSITE.to_dict()


def test_a_strict_serializer_gives_a_dict_that_the_compose_channel_turns_back() -> None:
    strict = JsonPlusSerializer(allowed_msgpack_modules=None)
    restored = strict.loads_typed(strict.dumps_typed(COMPOSITE))
    assert isinstance(restored, dict)
    assert KVCompose(KVHandle, "sources").from_checkpoint(restored).get() == COMPOSITE


def test_a_serialised_handle_is_under_one_kilobyte_and_readable_as_json() -> None:
    type_, stored = handle_serializer().dumps_typed(HANDLE)
    assert type_ == "msgpack"
    assert len(stored) < 1000
    assert len(json.dumps(HANDLE.to_dict())) < 1000
    assert KVHandle.coerce(json.loads(json.dumps(HANDLE.to_dict()))) == HANDLE


def test_the_allow_list_silences_langgraph_and_the_default_does_not(caplog: pytest.LogCaptureFixture) -> None:
    jsonplus._warned_unregistered_types.clear()
    with caplog.at_level(logging.WARNING):
        serializer = handle_serializer()
        serializer.loads_typed(serializer.dumps_typed(HANDLE))
    assert caplog.records == []
    with caplog.at_level(logging.WARNING):
        JsonPlusSerializer().loads_typed(JsonPlusSerializer().dumps_typed(HANDLE))
    assert "aaflow_langgraph.handle" in caplog.text


def test_the_helper_allows_the_applications_types_it_is_given_and_no_others() -> None:
    own = OwnState("why?")
    narrow, wide = handle_serializer(), handle_serializer(OwnState)
    assert narrow.loads_typed(narrow.dumps_typed(own)) == {"question": "why?"}
    assert wide.loads_typed(wide.dumps_typed(own)) == own
    assert wide.loads_typed(wide.dumps_typed(HANDLE)) == HANDLE


def test_the_allow_list_fits_a_savers_with_allowlist() -> None:
    saver = InMemorySaver(serde=JsonPlusSerializer(allowed_msgpack_modules=None))
    assert isinstance(saver.serde.loads_typed(saver.serde.dumps_typed(HANDLE)), dict)
    allowed = saver.with_allowlist(MSGPACK_ALLOWLIST)
    assert allowed.serde.loads_typed(allowed.serde.dumps_typed(HANDLE)) == HANDLE


def test_a_serializer_that_allows_nothing_gives_a_dict_that_the_channel_turns_back() -> None:
    strict = JsonPlusSerializer(allowed_msgpack_modules=None)
    restored = strict.loads_typed(strict.dumps_typed(HANDLE))
    assert isinstance(restored, dict)
    channel = KVChannel(KVHandle, "docs").from_checkpoint(restored)
    assert isinstance(channel.get(), KVHandle)
    assert channel.get() == HANDLE


def test_forged_bytes_never_become_a_handle() -> None:
    serializer = handle_serializer()
    type_, stored = serializer.dumps_typed(HANDLE)
    forged = serializer.loads_typed((type_, stored.replace(b"a" * 64, b"../../etc/passwd".ljust(64, b"/"))))
    assert not isinstance(forged, KVHandle)
    assert not KVChannel(KVHandle, "docs").from_checkpoint(forged).is_available()


STRICT_PROGRAM = """
import operator, sqlite3, sys
from typing import Annotated
from typing_extensions import TypedDict
from langgraph.checkpoint.serde._msgpack import STRICT_MSGPACK_ENABLED
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from aaflow_langgraph.composite import KVComposite
from aaflow_langgraph.graph.channels import KVBranches, KVChannel
from aaflow_langgraph.graph.compose_channel import KVCompose
from aaflow_langgraph.graph.serde import MSGPACK_ALLOWLIST, handle_serializer
from aaflow_langgraph.handle import KVHandle

assert STRICT_MSGPACK_ENABLED
handle = KVHandle("a" * 64, "b" * 64, 7)
other = KVHandle("c" * 64, "b" * 64, 7)

plain = JsonPlusSerializer()
assert isinstance(plain.loads_typed(plain.dumps_typed(handle)), dict)
for serializer in (handle_serializer(), plain.with_msgpack_allowlist(MSGPACK_ALLOWLIST)):
    assert serializer.loads_typed(serializer.dumps_typed(handle)) == handle

class State(TypedDict):
    docs: Annotated[KVHandle, KVChannel]
    drafts: Annotated[dict[str, KVHandle], KVBranches]
    sources: Annotated[KVHandle, KVCompose]
    seen: Annotated[list, operator.add]

def write(state):
    return {"docs": handle, "drafts": {"a": handle}, "sources": {"x": handle, "y": other}}

def read(state):
    interrupt("wait")
    return {"seen": [type(state["docs"]).__name__, type(state["drafts"]["a"]).__name__, type(state["sources"]).__name__]}

builder = StateGraph(State)
builder.add_node(write)
builder.add_node(read)
builder.add_edge(START, "write")
builder.add_edge("write", "read")
config = {"configurable": {"thread_id": "1"}}
for name in ("compiled", "bare"):
    saver = SqliteSaver(sqlite3.connect(f"{sys.argv[1]}/{name}.db", check_same_thread=False))
    graph = builder.compile(checkpointer=saver)
    if name == "bare":
        graph.checkpointer = saver  # as a platform does that swaps the saver: no type of the graph is allowed
    graph.invoke({"seen": []}, config)
    assert isinstance(graph.get_state(config).values["docs"], KVHandle)
    result = graph.invoke(Command(resume="go"), config)
    assert result["seen"] == ["KVHandle", "KVHandle", "KVComposite"], result
    assert result["sources"] == KVComposite.of([handle, other]), result
    assert result["docs"] == handle and result["drafts"] == {"a": handle}
print("strict ok")
"""


def test_handles_survive_strict_mode_in_a_graph_with_and_without_an_allow_list(tmp_path: Path) -> None:
    environment = {**os.environ, "LANGGRAPH_STRICT_MSGPACK": "true"}
    finished = subprocess.run(
        [sys.executable, "-c", STRICT_PROGRAM, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "strict ok"
