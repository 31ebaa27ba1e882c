"""What ``aaflow new`` writes, and where it refuses to write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from aaflow_langgraph.cli import main
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.project import write_project

ROOT = Path(__file__).parents[2]
FILES = [".gitignore", "README.md", "chat.py", "documents.py", "kv.py", "langgraph.json", "memo.md", "studio.py"]


def test_a_project_is_written_into_a_new_or_an_empty_directory(tmp_path: Path) -> None:
    for folder in (tmp_path / "some" / "Fjords & Co", tmp_path / "empty"):
        folder.parent.mkdir(exist_ok=True)
        if folder.name == "empty":
            folder.mkdir()
        assert [path.name for path in write_project(folder)] == FILES
        assert (folder / "README.md").read_text(encoding="utf-8").startswith(f"# {folder.name}\n")
        assert ".langgraph_api/" in (folder / ".gitignore").read_text(encoding="utf-8").splitlines()
        for path in folder.glob("*.py"):
            compile(path.read_text(encoding="utf-8"), str(path), "exec")


def test_the_command_says_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "my project"]) == 0
    assert capsys.readouterr().out == "cd 'my project'\nlanggraph dev\n"


def test_nothing_is_ever_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "README.md").write_text("mine")
    assert main(["new", str(tmp_path)]) == 2
    assert "is not empty: 'README.md'" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]
    assert (tmp_path / "README.md").read_text() == "mine"


@pytest.mark.parametrize("name", ["new\nline", "nul\0", "bell\a"], ids=["newline", "nul", "bell"])
def test_a_name_that_cannot_be_shown_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no name that can be shown"):
        write_project(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_no_name_is_refused_although_pathlib_reads_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main(["new", ""])
    assert "argument DIR: it is empty" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_a_directory_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        write_project(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_project(tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="no name"):
        write_project(Path("/"))


def test_the_studio_example_is_what_the_command_writes_and_the_repositorys_config_points_to_it(tmp_path: Path) -> None:
    example = ROOT / "examples" / "studio"
    written = write_project(tmp_path / "studio")
    for path in written:
        assert (example / path.name).read_bytes() == path.read_bytes(), f"{path.name}: run aaflow new and copy it"
    own, of_root = (json.loads((folder / "langgraph.json").read_text()) for folder in (example, ROOT))
    assert of_root["dependencies"] == ["./examples/studio"]
    assert json.loads(json.dumps(own).replace('"./', '"./examples/studio/')) == of_root | {"dependencies": ["."]}
    for path in of_root["graphs"].values():
        assert os.path.exists(ROOT / path.partition(":")[0])
