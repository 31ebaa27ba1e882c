"""``aaflow bench agents``: every side is there, does the same work, and says what was measured."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from aaflow_langgraph.bench import agents
from aaflow_langgraph.bench.fan_out import Handles
from aaflow_langgraph.bench.sides import Text, make_task, without_end
from aaflow_langgraph.cli import main
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests import tiny

SIDES = {
    *("text-serial", "text-batched", "deepcopy-serial", "deepcopy-batched", "hf-continuous"),
    *("handles-serial", "handles-batched", "vllm", "llama.cpp"),
}
MEASURED = ("ttft_p50_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s", "kv_bytes", "agreement")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=700)


@pytest.fixture
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine.load(folder, dtype="float32", device="cpu")


def by_side(document: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
    return {row["side"]: row for row in document["rows"] if row["agents"] == count}


def test_the_last_line_is_one_document_in_which_every_side_has_a_row(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "agents", "--model", str(folder), "--dtype", "float32", "--agents", "3,1", "--context", "520"]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["name"] == "bench agents"
    assert document["shared_prefill_cpu_s"] > 0
    for count in (1, 3):
        rows = by_side(document, count)
        assert set(rows) == SIDES
        for name in SIDES - {"vllm", "llama.cpp", "hf-continuous"}:
            row = rows[name]
            assert all(row[column] is not None for column in MEASURED), name
            assert row["context"] == 520
            assert row["agreement"] == 1.0, name
            assert row["out_tok_s"] == pytest.approx(count * 16 / row["total_s"], rel=0.01)
            assert row["rounds"] == (5 if name == "handles-batched" else 1)
        for name in ("vllm", "llama.cpp"):
            assert rows[name]["total_s"] is None
            assert rows[name]["note"].startswith("not run: ")
        for name in ("handles-serial", "handles-batched"):
            assert "kv_bytes" not in rows[name]["computed"]
        # Three agents hold one context and a little more, three conversations hold three.
        assert rows["text-batched"]["kv_bytes"] == pytest.approx(count * document["context_bytes"], rel=0.1)
    assert by_side(document, 3)["handles-batched"]["kv_bytes"] < 1.5 * document["context_bytes"]
    assert by_side(document, 3)["handles-batched"]["kv_bytes"] > by_side(document, 1)["handles-batched"]["kv_bytes"]


def test_continuous_batching_runs_here_or_says_why(engine: TransformersEngine) -> None:
    row = by_side(agents.run(engine, [2], 300, 8, 4, 5, 1), 2)["hf-continuous"]
    assert row["note"].startswith("not run: ") if row["total_s"] is None else row["agreement"] == 1.0


def test_a_serial_side_that_ran_some_agents_says_so_and_what_follows_for_all(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_MEASURED_TOKENS", 600)
    rows = by_side(agents.run(engine, [6], 300, 8, 4, 5, 1), 6)
    for name in ("text-serial", "deepcopy-serial"):
        row = rows[name]
        assert row["agents_measured"] == 2
        assert {"ttft_p50_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s"} <= set(row["computed"])
        assert row["total_s"] == pytest.approx(6 * row["agent_s"], rel=0.01)
        assert row["ttft_p50_s"] < row["ttft_max_s"] < row["total_s"]
    assert rows["handles-batched"]["agents_measured"] == 6
    assert rows["handles-batched"]["agreement"] == 1.0  # over the agents that text-serial ran


def test_the_context_is_cut_to_the_window(engine: TransformersEngine) -> None:
    document = agents.run(engine, [1], 9999, 8, 4, 5, 1)
    assert {row["context"] for row in document["rows"]} == {700 - 8 - 4}


def test_a_question_and_an_answer_that_fill_the_window_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "agents", "--model", str(folder), "--new", "600", "--output", "100"]) == 2
    assert "700" in capsys.readouterr().err


def test_nobody_stops_early_and_the_engine_is_as_it_was_afterwards(engine: TransformersEngine) -> None:
    task = make_task(engine, 300, 2, 8, 6)
    assert (len(task.context_ids), {len(ids) for ids in task.question_ids}) == (300, {8})
    before = engine.model.generation_config
    with without_end(engine, 6):
        usual = Text(engine, task, batched=True).run(2).token_ids
    # Every id ends a turn now: only a side that honours the fixed length still answers in full.
    everything = frozenset(range(engine.vocab_size))
    engine.stop_ids = everything
    with without_end(engine, 6):
        handles = Handles(engine, task, 2, batched=True)
        answers = handles.run(2).token_ids
        handles.close()
    assert answers == usual
    assert engine.stop_ids == everything
    assert engine.model.generation_config is before


def test_a_second_run_of_the_graph_prefills_the_questions_again_and_holds_no_more(engine: TransformersEngine) -> None:
    task = make_task(engine, 300, 3, 8, 4)
    handles = Handles(engine, task, 3, batched=True)
    with without_end(engine, 4):
        held = [handles.broker.stats().pool_used_bytes]
        prefilled = [handles.broker.stats().num_prefilled_tokens]
        for _ in range(2):
            handles.run(3)
            held.append(handles.broker.stats().pool_used_bytes)
            prefilled.append(handles.broker.stats().num_prefilled_tokens)
    handles.close()
    assert held == [held[0]] * 3
    assert [later - sooner for sooner, later in itertools.pairwise(prefilled)] == [24, 24]
