"""A process that runs a thread is killed, at every point between the KV store and LangGraph's rows; another one goes on."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from aaflow_langgraph import KVBroker, KVCheckpointSaver
from aaflow_langgraph.checkpoint.find import find_handles
from aaflow_langgraph.cli import main
from tests.brokers import Host, host  # noqa: F401
from tests.talks import POINTS, SHORT, THREAD, Talker, go_on, questions, talking

LONG = 11
OCCURRENCES = (*(1, 4, 7), *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3, 5, 6, *range(8, 21))))


@pytest.fixture(scope="module")
def expected(engines: Callable[..., object]) -> list[list[int]]:
    """The answers of a conversation that nobody disturbs, without any saver."""
    with KVBroker.open(engines(), pool_bytes=8 << 20) as broker:  # type: ignore[arg-type]
        answers: list[list[int]] = []
        plan = None
        for question in questions(LONG):
            heard = broker.prefill(question, parent=plan).handle
            made = broker.generate("Be brief.", parent=heard, sampling=SHORT)
            answers.append(list(made.token_ids))
            plan = made.handle
        return answers


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("occurrence", OCCURRENCES)
def test_a_thread_goes_on_with_the_same_tokens_wherever_its_process_was_killed(
    point: str,
    occurrence: int,
    host: Host,
    expected: list[list[int]],
    open_broker: Callable[..., KVBroker],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With ``sync``: every checkpoint is whole or absent, nothing is computed twice, nothing is left behind."""
    assert Talker(tmp_path, host.folder, die_at=(point, occurrence)).exit_code_after(LONG) == -signal.SIGKILL
    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path, broker, durability="sync") as saver:
        saver.sweep(grace_s=0)
        assert found_by_check(tmp_path, capsys) == []
        for found in saver.list(THREAD):
            for handle in find_handles((found.checkpoint, found.pending_writes)):
                assert broker.transfer(handle).num_missing == 0
        graph = talking(broker).compile(checkpointer=saver)
        answered = len(graph.get_state(THREAD).values.get("answers", []))
        assert go_on(graph, questions(min(LONG, answered + 1))) == expected[: answered + 1]
        assert broker.stats().num_recomputed_tokens == 0
        assert found_by_check(tmp_path, capsys) == []
        saver.delete_thread("talk")
        left = saver.stats()
        assert (left.tensor_bytes, left.manifest.num_recipes, left.manifest.num_references) == (0, 0, 0)


def found_by_check(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    """What ``aaflow check`` says of everything beside the saver, against the saver's own rows."""
    capsys.readouterr()
    status = main(["check", "--checkpoints", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == (1 if document["findings"] else 0)
    found: list[dict[str, str]] = document["findings"]
    return found
