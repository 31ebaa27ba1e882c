"""``aaflow bench agents``: every side is there, does the same work, and says what was measured."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aaflow_langgraph.bench import agents, agents_plot, lineup
from aaflow_langgraph.bench.fan_out import Handles
from aaflow_langgraph.bench.measured import Measured
from aaflow_langgraph.bench.pairs import NO_PREFILL, Prefill, compare, extended
from aaflow_langgraph.bench.sides import NotRun, Outcome, Task, make_task, without_end
from aaflow_langgraph.bench.stock import Text
from aaflow_langgraph.cli import main
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests import tiny

OWN = tuple(name for name in lineup.NAMES if name not in lineup.PEERS)
MEASURED = ("ttft_p50_s", "ttft_p95_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s", "kv_bytes", "agreement")
COMPUTED = {"ttft_p50_s", "ttft_p95_s", "ttft_max_s", "total_s", "cpu_s", "out_tok_s"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny"), max_position_embeddings=700)


@pytest.fixture(scope="module")
def engine(folder: Path) -> TransformersEngine:
    return TransformersEngine.load(folder, dtype="float32", device="cpu")


def by_side(document: dict[str, Any], count: int, what: str = "rows") -> dict[str, dict[str, Any]]:
    return {row["side"]: row for row in document[what] if row["agents"] == count}


def test_the_last_line_is_one_document_in_which_every_side_has_a_row_and_pairs_beside_handles(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, page = tmp_path / "agents.svg", tmp_path / "agents.md"
    command = ["bench", "agents", "--model", str(folder), "--dtype", "float32", "--agents", "3,1", "--context", "520"]
    command += ["--sides", *OWN, "--svg", str(picture), "--markdown", str(page)]
    assert main(command) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["name"] == "bench agents"
    assert document["took_s"] > 0
    assert document["threads"] == torch.get_num_threads()
    assert document["shared_prefill_cpu_s"] == document["contexts"][0]["shared_prefill_cpu_s"] > 0
    for count in (1, 3):
        rows, pairs = by_side(document, count), by_side(document, count, "pairs")
        assert tuple(rows) == OWN
        for name, row in rows.items():
            if row["total_s"] is None:
                assert name == "hf-continuous"
                assert row["note"].startswith("not run: ")
                continue
            assert all(row[column] is not None for column in MEASURED), name
            assert row["context"] == 520
            assert row["agreement"] == 1.0, name
            assert row["out_tok_s"] == pytest.approx(count * 16 / row["total_s"], rel=0.01)
            assert name == "hf-continuous" or row["first_token_kl"] < 1e-5, name
            if name != "handles-batched":
                assert row["rounds"] == pairs[name]["num_pairs"] == len(pairs[name]["cpu"]["each"])
                assert row["rounds"] == (5 if name in ("text-serial", "deepcopy-batched") else 1)
                for ratio in ("cpu", "out_tok_s", "ttft_p50", "ttft_max"):
                    assert 0 < pairs[name][ratio]["min"] <= pairs[name][ratio]["median"] <= pairs[name][ratio]["max"]
        # One run of handles beside every run of another side, and nothing more.
        assert rows["handles-batched"]["rounds"] == sum(pair["num_pairs"] for pair in pairs.values())
        for name in ("handles-serial", "handles-batched"):
            assert "kv_bytes" not in rows[name]["computed"]
        # Three agents hold one context and a little more, three conversations hold three.
        context_bytes = document["contexts"][0]["context_bytes"]
        assert rows["text-batched"]["kv_bytes"] == pytest.approx(count * context_bytes, rel=0.1)
    held = [by_side(document, count)["handles-batched"]["kv_bytes"] for count in (1, 3)]
    assert held[0] < held[1] < 1.5 * context_bytes
    assert [stream["side"] for stream in document["streams"]] == ["handles-batched"]
    text = page.read_text(encoding="utf-8")
    assert all(text.count(f"| {name}") >= 2 for name in OWN)
    drawn = picture.read_bytes()
    assert b"agents on 520 tokens" in drawn
    agents_plot.draw(document, picture)
    assert picture.read_bytes() == drawn
    fewest = min(row["agents"] for row in document["rows"])
    only = [row for row in document["rows"] if row["agents"] == fewest]
    agents_plot.draw({**document, "rows": only}, picture)
    bars = picture.read_text()
    assert f"{fewest} agents on 520 tokens" in bars
    assert all(f">{row['side']}<" in bars for row in only)
    (ours,) = (row for row in only if row["side"] == "handles-batched")
    assert f">{ours['total_s']:.3g}<" in bars


def test_continuous_batching_runs_here_or_says_why(engine: TransformersEngine) -> None:
    row = by_side(agents.run(engine, [2], [300], 8, 4, 5, 1, ["text-serial", "hf-continuous"]), 2)["hf-continuous"]
    assert row["note"].startswith("not run: ") if row["total_s"] is None else row["agreement"] == 1.0


def test_sides_that_run_some_agents_say_so_and_what_follows_for_all(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = ("text-serial", "text-batched", "deepcopy-serial")
    monkeypatch.setattr(lineup, "_RUN_TOKENS", dict.fromkeys(some, 600))
    document = agents.run(engine, [6], [300], 8, 4, 5, 2, [*some, "deepcopy-batched"])
    rows = by_side(document, 6)
    for name in some:
        row = rows[name]
        assert row["agents_measured"] == 2
        assert set(row["computed"]) > COMPUTED
        assert row["total_s"] == pytest.approx(6 * row["agent_s"], rel=0.01)
        assert row["ttft_p50_s"] < row["ttft_max_s"] < row["total_s"]
        assert by_side(document, 6, "pairs")[name]["is_computed"]
    for name in ("deepcopy-batched", "handles-batched"):
        assert rows[name]["agents_measured"] == 6
        assert not set(rows[name]["computed"]) & COMPUTED
        assert rows[name]["agreement"] == 1.0  # over the agents that text-serial ran, others every round: all of them
    whole = by_side(agents.run(engine, [6], [300], 8, 4, 5, 1, ["text-batched"], whole=True), 6)["text-batched"]
    assert (whole["agents_measured"], whole["computed"]) == (6, ("kv_bytes",))
    assert whole["agreement"] is None  # text-serial was not asked for
    assert whole["first_token_kl"] is None


def test_a_serial_side_runs_others_every_time(engine: TransformersEngine) -> None:
    task = make_task(engine, 300, 3, 8, 4)
    with without_end(engine, 4):
        side = Text(engine, task, batched=False, most=2)
        seen = [side.run(3) for _ in range(3)]
    assert [outcome.numbers for outcome in seen] == [(0, 1), (2, 0), (1, 2)]
    assert seen[0].answers[0] == seen[1].answers[0]
    for number in range(3):
        logprobs = side.first_logprobs(number)
        assert logprobs is not None
        assert int(logprobs.argmax()) == {**seen[0].answers, **seen[1].answers}[number][0]


def test_a_side_that_gives_up_keeps_no_row_and_ends_nobody_elses(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(engine, 300, 2, 8, 4)

    def give_up(num_agents: int) -> Outcome:
        raise NotRun(f"no room for {num_agents}")

    names = ["text-serial", "text-batched"]
    with without_end(engine, 4), lineup.Lineup(engine, task, 2, names, whole=False) as sides:
        monkeypatch.setattr(sides.others[1], "run", give_up)
        measured = Measured(sides, 2, 300, 4)
        measured.run(5, 1, lambda _: None)
        rows = {row.side: row for row in measured.rows()}
    assert rows["text-batched"].note == "not run: no room for 2"
    assert rows["text-batched"].total_s is None
    assert [pair.side for pair in measured.pairs()] == ["text-serial"]
    assert rows["text-serial"].rounds == 5


class Server:
    """A peer that answers at once with what it was told to."""

    is_serial, note, computed = False, "scripted", ("kv_bytes",)

    def __init__(self, name: str, answers: dict[int, tuple[int, ...]] | None) -> None:
        self.name = name
        self.is_open = True
        self._answers = answers

    def run(self, num_agents: int) -> Outcome:
        if self._answers is None:
            raise NotRun("it is not installed")
        ids = tuple(self._answers[number] for number in range(num_agents))
        return Outcome(ids, (0.5,) * num_agents, 1.0, 2.0)

    def kv_bytes(self, num_agents: int) -> int:
        return 1

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        return torch.full((tiny.VOCAB,), -math.inf)

    def single_stream(self, num_tokens: int) -> float:
        if self._answers is None:
            raise NotRun("it is not installed")
        return 2.0

    def close(self) -> None:
        self.is_open = False


def test_peers_run_beside_handles_or_say_why_they_cannot(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine.load(folder, dtype="bfloat16", device="cpu")
    task = make_task(engine, 300, 2, 8, 4)
    with without_end(engine, 4):
        side = Text(engine, task, batched=False, most=2)
        right = side.run(2).answers
    half = {0: right[0], 1: tuple((token_id + 1) % tiny.VOCAB for token_id in right[1])}
    opened = {"vllm": Server("vllm", half), "llama.cpp": Server("llama.cpp", None)}

    def open_peer(name: str) -> Callable[[Path, Task, int], Server]:
        def opening(model_folder: Path, given: Task, most_agents: int) -> Server:
            assert (model_folder, given.context_ids, most_agents) == (folder, task.context_ids, 2)
            return opened[name]

        return opening

    monkeypatch.setattr(lineup, "_PEERS", {name: open_peer(name) for name in lineup.PEERS})
    document = agents.run(engine, [2], [300], 8, 4, 5, 1, ["text-serial", *lineup.PEERS])
    rows, pairs = by_side(document, 2), by_side(document, 2, "pairs")
    assert rows["llama.cpp"]["note"] == "not run: it is not installed"
    assert (rows["vllm"]["total_s"], rows["vllm"]["cpu_s"], rows["vllm"]["agreement"]) == (1.0, 2.0, 0.5)
    assert rows["vllm"]["first_token_kl"] is None  # no finite one, and JSON has no infinity
    assert (pairs["vllm"]["num_pairs"], pairs["vllm"]["cpu_with_prefill"]) == (5, None)
    alone = {stream["side"]: stream for stream in document["streams"]}
    assert (alone["vllm"]["tok_s"], alone["vllm"]["rounds"]) == (2.0, 5)
    assert alone["vllm"]["handles"]["median"] == pytest.approx(alone["handles-batched"]["tok_s"] / 2.0, rel=0.01)
    assert "llama.cpp" not in {*pairs, *alone}
    assert not any(server.is_open for server in opened.values())


def test_peers_need_the_same_dtype_and_a_folder(
    folder: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = by_side(agents.run(engine, [1], [300], 8, 4, 5, 1, lineup.PEERS), 1)
    assert set(rows) == {*lineup.PEERS, "handles-batched"}
    assert all(rows[name]["note"] == "not run: peers run bfloat16, the others float32" for name in lineup.PEERS)
    assert rows["handles-batched"]["rounds"] == 5
    monkeypatch.setattr(engine, "folder", None)
    rows = by_side(agents.run(engine, [1], [300], 8, 4, 5, 1, lineup.PEERS), 1)
    assert all("folder" in rows[name]["note"] for name in lineup.PEERS)


def test_ratios_are_of_pairs_and_count_the_first_prefill_of_both(engine: TransformersEngine) -> None:
    def outcome(total_s: float) -> Outcome:
        return Outcome(((1,), (2,)), (total_s / 2, total_s), total_s, 2 * total_s)

    runs = [(outcome(4.0), outcome(1.0)), (outcome(30.0), outcome(10.0)), (outcome(16.0), outcome(2.0))]
    pairs = compare("other", 2, 300, runs, (Prefill(4.0, 2.0), Prefill(2.0, 1.0)), is_computed=False)
    assert pairs.cpu.each == (4.0, 3.0, 8.0)
    assert (pairs.cpu.median, pairs.cpu.min, pairs.cpu.max) == (4.0, 3.0, 8.0)
    assert pairs.cpu_with_prefill is not None
    assert pairs.cpu_with_prefill.each == (3.0, 2.909, 6.0)
    assert pairs.total_with_prefill is not None
    assert pairs.total_with_prefill.each == (3.0, 2.909, 6.0)
    keeps_nothing = compare("text", 2, 300, runs[:1], (NO_PREFILL, Prefill(2.0, 1.0)), is_computed=True)
    assert keeps_nothing.cpu_with_prefill is not None
    assert keeps_nothing.cpu_with_prefill.each == (2.0,)
    assert compare("server", 2, 300, runs, (None, NO_PREFILL), is_computed=False).cpu_with_prefill is None


def test_batches_that_wait_in_line_have_their_first_tokens_together() -> None:
    ran = Outcome(((1,), (2,)), (3.0, 3.0), 4.0, 6.0, own_ttft_s=3.0)
    assert extended(ran, 4, is_serial=False).ttft_s == (3.0, 3.0, 7.0, 7.0)
    assert extended(ran, 4, is_serial=False).total_s == 8.0
    one_by_one = Outcome(((1,), (2,)), (1.0, 3.0), 4.0, 6.0, own_ttft_s=1.0)
    assert extended(one_by_one, 4, is_serial=True).ttft_s == (1.0, 3.0, 5.0, 7.0)
    assert extended(one_by_one, 2, is_serial=True) is one_by_one


def test_contexts_are_cut_to_the_window(engine: TransformersEngine) -> None:
    document = agents.run(engine, [1], [9999, 300, 8888], 8, 4, 5, 1, [])
    assert [facts["context"] for facts in document["contexts"]] == [300, 700 - 8 - 4]
    assert [row["context"] for row in document["rows"]] == [300, 700 - 8 - 4]


@pytest.mark.parametrize(
    ("options", "said", "unsaid"),
    [
        (
            ["--sides", "handles-batched"],
            ["handles-batched: ", " tokens/s\n"],
            ["handles 1.00x", "how many times better"],
        ),
        (["--sides", "text-batched", "--output", "1"], ["how many times better", "--output 1"], ["tokens/s"]),
    ],
)
def test_handles_are_not_compared_with_themselves_and_one_token_has_no_rate(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    said: list[str],
    unsaid: list[str],
) -> None:
    page = tmp_path / "agents.md"
    command = ["bench", "agents", "--model", str(folder), "--dtype", "float32", "--agents", "1", "--context", "300"]
    assert main([*command, "--markdown", str(page), *options]) == 0
    out, err = capsys.readouterr()
    assert all(words in err for words in said)
    assert not any(words in err for words in unsaid)
    document, text = json.loads(out.splitlines()[-1]), page.read_text(encoding="utf-8")
    assert [stream["handles"] for stream in document["streams"]] == ([] if document["streams_note"] else [None])
    assert ("one stream |" in text) is bool(document["streams"])
    assert document["streams_note"] in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--new", "600", "--output", "100"], "700"),
        (["--sides", "text"], "text-serial"),
        (["--markdown", "nowhere/page.md"], "nowhere"),
    ],
)
def test_what_cannot_be_measured_or_written_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["bench", "agents", "--model", str(folder), *options]) == 2
    assert words in capsys.readouterr().err


def test_nobody_stops_early_and_the_engine_is_as_it_was_afterwards(engine: TransformersEngine) -> None:
    task = make_task(engine, 300, 2, 8, 6)
    assert (len(task.context_ids), {len(ids) for ids in task.question_ids}) == (300, {8})
    before, stop_ids = engine.model.generation_config, engine.stop_ids
    with without_end(engine, 6):
        usual = Text(engine, task, batched=True, most=2).run(2).token_ids
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
    engine.stop_ids = stop_ids


def test_a_second_run_of_the_graph_prefills_the_questions_again_and_holds_no_more(engine: TransformersEngine) -> None:
    task = make_task(engine, 300, 3, 8, 4)
    handles = Handles(engine, task, 3, batched=True)
    with without_end(engine, 4):
        held = [handles.broker.stats().pool_used_bytes]
        prefilled = [handles.broker.stats().num_prefilled_tokens]
        for _ in range(2):
            answers = handles.run(3).answers
            held.append(handles.broker.stats().pool_used_bytes)
            prefilled.append(handles.broker.stats().num_prefilled_tokens)
        logprobs = [handles.first_logprobs(number) for number in range(3)]
        assert handles.first_logprobs(3) is None
        assert handles.single_stream(4) > 0
        held.append(handles.broker.stats().pool_used_bytes)
    handles.close()
    assert held == [held[0]] * 4
    assert [later - sooner for sooner, later in itertools.pairwise(prefilled)] == [24, 24]
    for number, told in enumerate(logprobs):
        assert told is not None
        assert math.isclose(float(torch.logsumexp(told, 0)), 0.0, abs_tol=1e-5)
        assert int(told.argmax()) == answers[number][0]
