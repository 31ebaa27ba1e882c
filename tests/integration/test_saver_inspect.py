"""``aaflow check --checkpoints`` and ``aaflow gc --checkpoints`` against a real saver's directory."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver

from aaflow_langgraph import KVBroker, KVCheckpointSaver
from aaflow_langgraph.cli import main
from aaflow_langgraph.inspection import check, clean
from tests.talks import THREAD, go_on, questions, talking


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at work between the two looks."""
    monkeypatch.setattr(check, "PAUSE_S", 0.0)
    monkeypatch.setattr(clean, "PAUSE_S", 0.0)


@pytest.fixture
def place(open_broker: Callable[..., KVBroker], tmp_path: Path) -> Path:
    """A directory with a thread of two turns in it, its saver and broker closed."""
    broker = open_broker()
    with KVCheckpointSaver.local(tmp_path / "kept", broker, durability="sync") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(2))
    broker.close()
    return tmp_path / "kept"


@pytest.fixture
def run(place: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Exit status and document of a command on that directory."""

    def command(name: str, *options: str, path: Path = place) -> tuple[int, Any]:
        capsys.readouterr()
        status = main([name, "--checkpoints", str(path), "--json", *options])
        out, err = capsys.readouterr()
        assert err == ""
        return status, json.loads(out)

    return command


def beside(place: Path) -> Path:
    return place / "checkpoints.sqlite.kv"


def files(place: Path) -> list[Path]:
    return sorted(path for path in beside(place).rglob("*.safetensors") if "quarantine" not in path.parts)


def change(database: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(database)) as db, db:
        assert db.execute(statement, values).rowcount > 0


def found(document: Any) -> list[str]:
    return [f"{one['invariant']} {one['what']}" for one in document["findings"]]


def state_of(place: Path) -> dict[str, str]:
    """Everything that a command could change; what SQLite keeps beside its files for readers is no change."""
    return {
        str(path.relative_to(place)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(place.rglob("*"))
        if path.is_file() and not path.name.endswith(("-shm", "-wal"))
    }


@pytest.mark.parametrize("named", ["kept", "kept/checkpoints.sqlite", "kept/checkpoints.sqlite.kv"])
def test_a_thread_that_nobody_disturbed_has_nothing_to_be_found(
    named: str, place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    before = state_of(place)
    status, document = run("check", "--payloads", path=place.parent / named)
    assert (status, document["findings"]) == (0, [])
    assert document["num_files"] == len(files(place)) > 0
    assert run("gc", path=place.parent / named) == (
        0,
        {"schema": 1, "name": "gc", "applied": False, "removed": [], "num_bytes": 0},
    )
    assert state_of(place) == before


def test_a_saver_at_work_has_nothing_to_be_found(
    open_broker: Callable[..., KVBroker], place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    broker = open_broker()
    with KVCheckpointSaver.local(place, broker, durability="sync") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(3))
        assert run("check")[0] == 0
        assert run("gc", "--apply")[1]["removed"] == []
        saver.delete_thread("talk")
        assert run("check")[1]["findings"] == []
    assert files(place) == []


def test_tensors_that_are_gone_are_worth_a_note(place: Path, run: Callable[..., tuple[int, Any]]) -> None:
    for file in files(place):
        file.unlink()
    status, document = run("check")
    assert (status, document["findings"]) == (0, [])
    assert any("tensors of 4 of 4 recipes are not on disk" in note for note in document["notes"])


def test_a_file_that_no_recipe_needs_is_found_and_removed(
    open_broker: Callable[..., KVBroker], place: Path, run: Callable[..., tuple[int, Any]], tmp_path: Path
) -> None:
    other = open_broker()
    with KVCheckpointSaver.local(tmp_path / "other", other, durability="sync") as saver:
        graph = talking(other).compile(checkpointer=saver)
        graph.invoke({"question": "Something else entirely?"}, THREAD)
    for file in files(tmp_path / "other"):
        target = beside(place) / file.relative_to(beside(tmp_path / "other"))
        target.parent.mkdir(exist_ok=True)
        shutil.copy(file, target)
    needed = len(files(place)) - len(files(tmp_path / "other"))
    status, document = run("check")
    assert status == 1
    assert sum("I11" in what and "no recipe needs" in what for what in found(document)) == len(
        files(tmp_path / "other")
    )
    before = state_of(place)
    _, planned = run("gc")
    assert state_of(place) == before, "a dry run changes nothing"
    _, done = run("gc", "--apply")
    assert done["removed"] == planned["removed"]
    assert done["num_bytes"] == sum(file.stat().st_size for file in files(tmp_path / "other")) > 0
    assert len(files(place)) == needed
    assert run("check")[0] == 0


def test_references_of_checkpoints_that_the_saver_lost_are_found_and_removed_with_what_only_they_needed(
    place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    for table in ("checkpoints", "writes"):
        change(place / "checkpoints.sqlite", f"DELETE FROM {table}")
    status, document = run("check")
    assert status == 1
    assert all("which the saver does not have" in what for what in found(document))
    assert {one["where"] for one in document["findings"]} == {"checkpoints"}
    _, done = run("gc", "--apply")
    assert all(one["what"].startswith("references of checkpoint") for one in done["removed"])
    run("gc", "--apply")
    assert files(place) == []
    assert run("check")[1]["findings"] == []


def test_references_that_were_written_ahead_a_moment_ago_are_left_alone(
    place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    change(beside(place) / "manifest.sqlite", "UPDATE refs SET state = 0")
    for table in ("checkpoints", "writes"):
        change(place / "checkpoints.sqlite", f"DELETE FROM {table}")
    assert run("check")[1]["findings"] == []
    assert run("gc", "--apply")[1]["removed"] == []
    change(beside(place) / "manifest.sqlite", "UPDATE refs SET created_s = created_s - 3601")
    assert run("check")[0] == 1


def test_recipes_that_no_checkpoint_needs_are_found_and_removed(
    place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    change(beside(place) / "manifest.sqlite", "DELETE FROM refs")
    assert "I11 4 recipes are needed by no checkpoint" in found(run("check")[1])[0]
    run("gc", "--apply")
    run("gc", "--apply")  # now nothing needs the files
    assert (run("check")[1]["findings"], files(place)) == ([], [])


def test_a_recipe_that_is_damaged_or_stands_on_nothing_is_found(
    place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    manifest = beside(place) / "manifest.sqlite"
    change(manifest, "DELETE FROM recipes WHERE parent IS NULL")
    assert any("I12" in what and "which is not there" in what for what in found(run("check")[1]))
    change(manifest, "UPDATE recipes SET body = CAST(replace(CAST(body AS TEXT), '1', '2') AS BLOB)")
    assert sum("I5" in what for what in found(run("check")[1])) == 3


def test_damaged_files_are_reported_and_quarantined_ones_removed_when_asked(
    open_broker: Callable[..., KVBroker], place: Path, run: Callable[..., tuple[int, Any]]
) -> None:
    for file in files(place):
        body = bytearray(file.read_bytes())
        body[len(body) // 2] ^= 1
        file.write_bytes(body)
    assert run("check")[0] == 0, "the KV is not read unless it is asked for"
    assert sum("its KV does not have its checksum" in what for what in found(run("check", "--payloads")[1])) == len(
        files(place)
    )
    broker = open_broker()
    with KVCheckpointSaver.local(place, broker) as saver:
        graph = talking(broker).compile(checkpointer=saver)
        broker.transfer(graph.get_state(THREAD).values["plan"])
        assert any("quarantine/" in what for what in found(run("check")[1]))
        assert run("gc")[1]["removed"] == []
        assert run("gc", "--quarantine", "--apply")[1]["num_bytes"] > 0
        assert not any("quarantine/" in what for what in found(run("check")[1]))


def test_a_saver_whose_rows_are_elsewhere_is_checked_as_far_as_can_be_seen(
    open_broker: Callable[..., KVBroker], run: Callable[..., tuple[int, Any]], tmp_path: Path
) -> None:
    broker = open_broker()
    with KVCheckpointSaver(InMemorySaver(), broker, durability="recipe", directory=tmp_path / "d") as saver:
        go_on(talking(broker).compile(checkpointer=saver), questions(1))
    status, document = run("check", path=tmp_path / "d")
    assert (status, document["findings"]) == (0, [])
    assert any("rows are not known here" in note for note in document["notes"])


@pytest.mark.parametrize("command", ["check", "gc"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda place: shutil.rmtree(beside(place)), "has no manifest.sqlite"),
        (lambda place: (beside(place) / "manifest.sqlite").write_bytes(b"no database at all" * 100), "is damaged"),
        (lambda place: change_pragma(place, "user_version = 99"), "newer version (format 99, this one knows"),
        (lambda place: change_pragma(place, "application_id = 7"), "another program's database"),
        (lambda place: os.chmod(beside(place) / "extents", 0o755), "chmod it to 700"),
    ],
    ids=["absent", "damaged", "newer", "foreign", "open to others"],
)
def test_what_cannot_be_looked_at_is_said_in_one_line(
    command: str,
    spoil: Callable[[Path], object],
    message: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(place)
    capsys.readouterr()
    assert main([command, "--checkpoints", str(place)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("path", ["/", ".", "no/such/place", ""])
def test_a_path_that_is_no_savers_is_refused(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (["check"], ["gc"], ["history", "talk"]):
        assert main([*command, "--checkpoints", path]) == 2
        assert "has no manifest.sqlite" in capsys.readouterr().err


def change_pragma(place: Path, pragma: str) -> None:
    with closing(sqlite3.connect(beside(place) / "manifest.sqlite")) as db:
        db.execute(f"PRAGMA {pragma}")
