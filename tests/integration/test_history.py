"""``aaflow history``: what it says of a thread whose handles, nodes and files are known."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send

from aaflow_langgraph import KVBroker, KVCheckpointSaver
from aaflow_langgraph.cli import main
from tests import tiny
from tests.talks import SHORT, THREAD, Talk, go_on, questions, talking

History = Callable[..., Any]


@pytest.fixture
def history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> History:
    """The document of ``aaflow history``."""

    def command(*words: str, thread: str = "talk", path: Path = tmp_path / "kept") -> Any:
        capsys.readouterr()
        assert main(["history", thread, *words, "--checkpoints", str(path), "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return command


@pytest.fixture
def broker(open_broker: Callable[..., KVBroker]) -> KVBroker:
    return open_broker()


def files(place: Path) -> list[Path]:
    return sorted((place / "checkpoints.sqlite.kv" / "extents").rglob("*.safetensors"))


def names(handles: list[dict[str, Any]]) -> list[tuple[str, str, str | None]]:
    return [(one["place"], one["label"], one["written_by"]) for one in handles]


def test_every_checkpoint_has_its_step_its_node_and_its_handles(
    broker: KVBroker, history: History, tmp_path: Path
) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        go_on(graph, questions(2))
        states = list(graph.get_state_history(THREAD))
    seen = history()["checkpoints"]
    assert [one["checkpoint_id"] for one in seen] == [state.config["configurable"]["checkpoint_id"] for state in states]
    assert [one["step"] for one in seen] == [state.metadata["step"] for state in states]
    assert [one["nodes"] for one in seen[:2]] == [["answer"], ["listen"]]
    assert seen[-1]["source"] == "input"
    newest = seen[0]["handles"]
    assert names(newest) == [("heard", "heard", "listen"), ("plan", "plan", "answer")]
    assert [one["num_tokens"] for one in newest] == [states[0].values[name].kv_tokens for name in ("heard", "plan")]
    assert {one["tier"] for one in newest} == {"disk"}
    assert {one["is_durable"] for one in newest} == {True}
    assert seen[0]["private_bytes"] > 0, "only the newest one's answer is there"
    assert seen[0]["private_bytes"] + seen[0]["shared_bytes"] == sum(
        file.stat().st_size for file in files(tmp_path / "kept")
    )


def test_bytes_are_private_until_another_thread_needs_them(broker: KVBroker, history: History, tmp_path: Path) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        graph.invoke({"question": "Who?"}, THREAD)
        before = history()["checkpoints"][0]
        saver.copy_thread("talk", "copy")
    after = history()["checkpoints"][0]
    assert before["private_bytes"] > 0
    assert (after["private_bytes"], after["shared_bytes"]) == (
        0,
        before["private_bytes"] + before["shared_bytes"],
    )
    assert len(history(thread="copy")["checkpoints"]) == len(history()["checkpoints"])


def test_the_tier_follows_the_files(broker: KVBroker, history: History, tmp_path: Path) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(2))
    plan = history()["checkpoints"][0]["handles"][-1]
    assert plan["tier"] == "disk"
    assert plan["num_on_disk"] >= plan["num_tokens"] - 4, "the last token and the end of the turn have no KV yet"
    for file in files(tmp_path / "kept")[1:]:
        file.unlink()
    tiers = {one["tier"] for checkpoint in history()["checkpoints"] for one in checkpoint["handles"]}
    assert tiers <= {"disk", "part", "recipe"}
    assert tiers & {"part", "recipe"}
    for file in files(tmp_path / "kept"):
        file.unlink()
    tiers = {one["tier"] for checkpoint in history()["checkpoints"] for one in checkpoint["handles"]}
    assert tiers == {"recipe"}


def test_pushed_tasks_subgraphs_updates_and_pending_writes_are_named(
    broker: KVBroker, history: History, tmp_path: Path
) -> None:
    def work(payload: Talk) -> dict[str, Any]:
        return {"plan": broker.generate("Go.", parent=payload["heard"], sampling=SHORT).handle}

    def deeper(state: Talk) -> dict[str, Any]:
        return {"plan": broker.generate("Deeper.", parent=state["plan"], sampling=SHORT).handle}

    def fails(state: Talk) -> dict[str, Any]:
        raise RuntimeError("not today")

    def side(state: Talk) -> dict[str, Any]:
        return {"heard": broker.prefill("At the side.").handle}

    below: StateGraph[Any] = StateGraph(Talk)
    below.add_node("deeper", deeper)
    below.add_edge(START, "deeper")
    builder: StateGraph[Any] = StateGraph(Talk)
    builder.add_node("listen", lambda state: {"heard": broker.prefill(state["question"]).handle})
    builder.add_node("work", work)
    builder.add_node("child", below.compile())
    builder.add_node("fails", fails)
    builder.add_node("side", side)
    builder.add_edge(START, "listen")
    builder.add_conditional_edges("listen", lambda state: [Send("work", {"heard": state["heard"]})], ["work"])
    builder.add_edge("work", "child")
    builder.add_edge("child", "fails")
    builder.add_edge("child", "side")
    builder.add_edge("fails", END)
    builder.add_edge("side", END)
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        graph = builder.compile(checkpointer=saver)
        with pytest.raises(RuntimeError, match="not today"):
            graph.invoke({"question": "Who?"}, THREAD)
        own = [one for one in history()["checkpoints"] if not one["checkpoint_ns"]]
        below_it = [one for one in history()["checkpoints"] if one["checkpoint_ns"].startswith("child:")]
        assert [one["nodes"] for one in own[:3]] == [["child"], ["work"], ["listen"]]
        assert below_it[0]["nodes"] == ["deeper"]
        assert names(own[0]["handles"])[1] == ("plan", "", "child/deeper")
        assert names(own[1]["handles"])[1] == ("plan", "", "work")
        assert [one["written_by"] for one in own[0]["pending"]] == ["side"]


def test_what_was_updated_by_hand_is_said_to_be(broker: KVBroker, history: History, tmp_path: Path) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        go_on(graph, questions(1))
        graph.update_state(THREAD, {"plan": broker.prefill("By hand.").handle})
    newest = history()["checkpoints"][0]
    assert newest["source"] == "update"
    assert names(newest["handles"]) == [("heard", "heard", "listen"), ("plan", "", "update_state")]


def test_diff_finds_the_first_token_that_differs_and_who_wrote_it(
    broker: KVBroker, history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        go_on(graph, questions(2))
        old = next(state for state in graph.get_state_history(THREAD) if state.next == ("listen",))
        graph.invoke(None, graph.update_state(old.config, {"question": "Quick: what else?"}))
        b, *_, a = [state for state in graph.get_state_history(THREAD) if state.metadata["step"] in (6, 7)]
        ids = [broker.token_ids(state.values["plan"]) for state in (a, b)]
    at = next(at for at, (x, y) in enumerate(zip(*ids, strict=False)) if x != y)
    told = {
        one["place"]: one
        for one in history(
            "diff", a.config["configurable"]["checkpoint_id"], b.config["configurable"]["checkpoint_id"][:-3]
        )["differences"]
    }["plan"]
    assert told["position"] == at > 80
    assert tuple(told["before"]) == ids[0][at - 8 : at]
    assert tuple(told["a"]["token_ids"]) == ids[0][at : at + 8]
    assert tuple(told["b"]["token_ids"]) == ids[1][at : at + 8]
    assert told["a"]["written_by"] == told["b"]["written_by"] == "listen"
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    names = [state.config["configurable"]["checkpoint_id"] for state in (a, b)]
    command = ["history", "talk", "diff", *names, "--checkpoints", str(tmp_path / "kept")]
    capsys.readouterr()
    assert main([*command, "--model", str(tmp_path / "model")]) == 0
    out = capsys.readouterr().out
    assert "'estion 1'; written by listen" in out
    assert "'ick: wha'; written by listen" in out
    told = {one["place"]: one for one in history("diff", names[0], names[0])["differences"]}["plan"]
    assert told["position"] is None


def test_a_sequence_that_goes_on_differs_where_the_other_ends(
    broker: KVBroker, history: History, tmp_path: Path
) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="recipe") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        go_on(graph, questions(2))
        newest, *_ = states = list(graph.get_state_history(THREAD))
        older = next(state for state in states if state.values["plan"] != newest.values["plan"])
    told = history("diff", *(state.config["configurable"]["checkpoint_id"] for state in (older, newest)))
    plan = next(one for one in told["differences"] if one["place"] == "plan")
    assert plan["position"] == older.values["plan"].kv_tokens
    assert plan["a"]["token_ids"] == []
    assert plan["b"]["written_by"] == "listen"


def test_without_the_savers_rows_the_manifest_tells_what_it_knows(
    broker: KVBroker, history: History, tmp_path: Path
) -> None:
    with KVCheckpointSaver(InMemorySaver(), broker, durability="sync", directory=tmp_path / "d") as saver:
        graph = talking(broker).compile(checkpointer=saver)
        go_on(graph, questions(1))
        first, second, *_ = history(path=tmp_path / "d")["checkpoints"]
        plan = graph.get_state(THREAD).values["plan"]
        told = history("diff", first["checkpoint_id"], second["checkpoint_id"], path=tmp_path / "d")
    assert plan.kv_id in {one["kv_id"] for one in first["handles"]}
    assert (first["step"], first["nodes"], first["source"]) == (None, [], "")
    assert {one["tier"] for one in first["handles"]} == {"disk"}
    assert told["differences"][0]["a"]["kv_id"] == plan.kv_id


class _Backwards:
    """No cipher to hide anything behind, one as LangGraph knows it."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "backwards", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return ciphertext[::-1]


def test_what_is_encrypted_is_listed_and_not_compared(
    broker: KVBroker, history: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = sqlite3.connect(tmp_path / "c.sqlite", check_same_thread=False)
    serde = EncryptedSerializer(_Backwards())
    with (
        closing(connection),
        KVCheckpointSaver(SqliteSaver(connection, serde=serde), broker, durability="recipe") as saver,
    ):
        go_on(talking(broker).compile(checkpointer=saver), questions(1))
    first, second, *_ = history(path=tmp_path / "c.sqlite")["checkpoints"]
    assert first["nodes"] == ["answer"]
    assert {one["tier"] for one in first["handles"]} == {"recipe"}
    words = ["diff", first["checkpoint_id"], second["checkpoint_id"]]
    assert main(["history", "talk", *words, "--checkpoints", str(tmp_path / "c.sqlite")]) == 2
    assert "is encrypted" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nobody"], "no checkpoint of thread 'nobody' is there; threads with KV: 'talk'"),
        (["talk", "compare", "a", "b"], "'diff A B'"),
        (["talk", "diff", "a"], "'diff A B'"),
        (["talk", "diff", "zzz", "zzz"], "no checkpoints of thread 'talk'"),
        (["talk", "diff", "1", "1"], "checkpoints of thread 'talk' have an id"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(
    words: list[str], message: str, broker: KVBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="recipe") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(1))
    capsys.readouterr()
    assert main(["history", *words, "--checkpoints", str(tmp_path / "kept")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("columns", ["", "40", "160"])
def test_people_get_a_table_as_wide_as_it_needs_where_no_window_sets_a_width(
    columns: str,
    broker: KVBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", columns)
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(1))
    capsys.readouterr()
    assert main(["history", "talk", "--checkpoints", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    (line, *_) = [line for line in out.splitlines() if " answer " in line]
    assert "heard" in line
    assert "on disk, durable" in line
    assert line.rstrip().endswith(("B", "KiB", "MiB"))
    assert len(line) == max(map(len, out.splitlines())) < 160


def test_a_name_that_looks_like_markup_is_shown_as_it_is(
    broker: KVBroker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(_: Talk) -> dict[str, Any]:
        return {"heard": broker.prefill("a [/] b", label="[/red] docs [bold]").handle}

    builder = StateGraph(Talk).add_node("re[/x]ad", read).add_edge(START, "re[/x]ad")
    with KVCheckpointSaver.local(tmp_path / "kept", broker) as saver:
        builder.compile(checkpointer=saver).invoke({}, THREAD)
    capsys.readouterr()
    assert main(["history", "talk", "--checkpoints", str(tmp_path / "kept")]) == 0
    out = capsys.readouterr().out
    assert "re[/x]ad" in out
    assert "[/red] docs [bold]" in out
