"""Trace files: both public formats, and what is no trace; and ``aaflow bench evict`` on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from aaflow_langgraph.bench.evict import run
from aaflow_langgraph.bench.traces import read
from aaflow_langgraph.cli import main
from aaflow_langgraph.errors import ConfigError

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "traces"
needs_public_traces = pytest.mark.skipif(not PUBLIC.is_dir(), reason=f"no public traces in {PUBLIC}")


def lines(*requests: tuple[int, list[int]]) -> str:
    return "\n".join(json.dumps({"timestamp": at_ms, "hash_ids": ids}) for at_ms, ids in requests) + "\n"


def ask(at_s: float, ids: list[int], model: str = "m") -> dict[str, Any]:
    return {"t": at_s, "type": "n", "model": model, "hash_ids": ids}


def session(*requests: dict[str, Any], block_size: Any = 64) -> str:
    return json.dumps({"block_size": block_size, "hash_id_scope": "local", "requests": requests})


def written(tmp_path: Path, *texts: str) -> list[Path]:
    paths = []
    for number, text in enumerate(texts):
        paths.append(tmp_path / f"trace_{number}")
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def test_request_lines_come_in_the_order_of_time_with_blocks_of_512_tokens(tmp_path: Path) -> None:
    trace = read(written(tmp_path, lines((5, [7, 8]), (3, [7, 9]), (5, [7]))))
    assert (trace.block_tokens, trace.num_blocks, trace.name) == (512, 5, "trace_0")
    assert trace.requests == ((0, 2), (0, 1), (0,))


def test_a_subagent_began_its_duration_before_it_was_done(tmp_path: Path) -> None:
    """Done at 50 s after 40 s: its requests at 0 s and 15 s of its own are at 10 s and 25 s."""
    agent = {"t": 50.0, "type": "subagent", "duration_ms": 40_000, "requests": [ask(0, [5]), ask(15, [5, 6])]}
    trace = read(written(tmp_path, session(ask(0, [1]), ask(20, [1, 2]), agent, ask(60, [1]))))
    assert [len(chain) for chain in trace.requests] == [1, 1, 2, 2, 1]
    assert trace.requests == ((0,), (2,), (0, 1), (2, 3), (0,))


def test_files_run_side_by_side_and_share_no_ids_nor_do_models(tmp_path: Path) -> None:
    texts = session(ask(0, [1]), ask(2, [1], model="other")), session(ask(1, [1]), ask(3, [1]))
    trace = read(written(tmp_path, *texts))
    assert trace.requests == ((0,), (2,), (1,), (2,))


BAD = {
    "empty": ("", "line 1: not JSON"),
    "no requests": (session(), "no requests"),
    "neither format": ("[1, 2]", "line 1: neither request lines"),
    "torn line": (lines((1, [1])) + '{"timestamp": 2, "hash_', "line 2: not JSON: Unterminated string"),
    "torn document": ('{"block_size": 64,\n "requests": [', "line 2: not JSON"),
    "no list of ids": ('{"timestamp": 1, "hash_ids": "7"}', "line 1: hash_ids is not a list of whole numbers"),
    "an id that is text": ('{"timestamp": 1, "hash_ids": [1, true]}', "line 1: hash_ids is not a list"),
    "no time": ('{"timestamp": 1, "hash_ids": []}\n{"hash_ids": []}', "line 2: timestamp is None, not a time"),
    "no number": ('{"timestamp": NaN, "hash_ids": []}', "line 1: timestamp is nan, not a time"),
    "no object": ('{"timestamp": 1, "hash_ids": []}\n7', "line 2: a int, not an object"),
    "two parents": (lines((1, [1, 2]), (2, [3, 2])), "line 2: id 2 stands behind two different blocks"),
    "twice in one request": (lines((1, [1, 1])), "line 1: id 1 stands behind two"),
    "block size": (session(ask(0, [1]), block_size="64"), "block_size is '64', not a positive number"),
    "nested": (
        session({"t": 1, "type": "subagent", "duration_ms": 1, "requests": [3]}),
        r"requests\[0\].requests\[0\]",
    ),
    "no nested": (session({"t": 1, "type": "subagent"}), "a subagent without a list of requests"),
    "deep": ("[" * 100_000, "line 1: not JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_trace_is_refused_with_line_and_reason(tmp_path: Path, name: str) -> None:
    text, message = BAD[name]
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, text))


def test_a_file_that_cannot_be_read_and_block_sizes_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read([tmp_path / "absent"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as text"):
        read([tmp_path / "binary"])
    with pytest.raises(ConfigError, match="blocks of 64 tokens, those before have 512; replay them apart"):
        read(written(tmp_path, lines((1, [1])), session(ask(0, [1]))))


def test_the_command_prints_one_json_document_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    (path,) = written(tmp_path, lines((0, [1, 2]), (1, [3]), (2, [1, 2])))
    assert main(["bench", "evict", "--trace", str(path), "--policy", "lru", "fifo", "--blocks", "2,3,3"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out.splitlines()[-1])
    assert [(row["policy"], row["num_blocks"], row["num_hits"]) for row in document["rows"]] == [
        ("lru", 2, 1),
        ("fifo", 2, 1),
        ("lru", 3, 2),
        ("fifo", 3, 2),
    ]
    assert [bound["num_hits"] for bound in document["clairvoyant"]] == [2, 2]
    assert (document["infinite"]["num_hits"], document["num_distinct_blocks"]) == (2, 3)
    assert "clairvoyant" in printed.err


def test_the_command_refuses_a_bad_file_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    (path,) = written(tmp_path, "{")
    assert main(["bench", "evict", "--trace", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"aaflow: {path}, line 1: not JSON")


@needs_public_traces
def test_on_agents_lfu_is_the_worst_and_gdsf_behind_lru() -> None:
    trace = read(sorted((PUBLIC / "agentic").glob("*.json")))
    assert (len(trace.requests), trace.block_tokens) == (236, 64)
    hits = {row.policy: row.num_hits for row in run(trace, blocks=[5000]).rows}
    assert min(hits, key=lambda name: hits[name]) == "lfu"
    assert hits["gdsf"] < hits["lru"]


@needs_public_traces
def test_on_chat_gdsf_saves_more_work_than_lru() -> None:
    trace = read([PUBLIC / "mooncake_conversation_3000.jsonl"])
    assert (len(trace.requests), trace.num_blocks, trace.block_tokens) == (3000, 80_619, 512)
    saved = {row.policy: row.work_saved for row in run(trace, ["lru", "gdsf"], blocks=[2500]).rows}
    assert saved["gdsf"] > saved["lru"]
