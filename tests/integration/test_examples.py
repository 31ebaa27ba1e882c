"""The examples, on a tiny model: the same tokens with handles and with text, and what either way prefills."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import tiny

EXAMPLES = Path(__file__).parents[2] / "examples"

# Name, and how often with text a token is prefilled that with handles is prefilled once, at least.
SHAPES = {
    "map_reduce": 5,
    "reflection": 5,
    "plan_and_execute": 9,
    "agentic_rag": 5,
    "hierarchical_teams": 4,
    "resume_after_restart": 70,
    "existing_app_swap": 6,
    "supervisor": 2,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2, max_position_embeddings=8192)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, model: Path) -> Iterator[Callable[[str], ModuleType]]:
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load_one(name: str) -> ModuleType:
        monkeypatch.setattr(sys, "argv", [name, "--model", str(model)])
        return importlib.import_module(name)

    yield load_one
    for name in (*SHAPES, "compared", "reports"):
        sys.modules.pop(name, None)


def start(example: ModuleType) -> int:
    """As ``python examples/<name>.py`` does: the last lines of the file."""
    source = Path(str(example.__file__)).read_text(encoding="utf-8")
    _, _, call = source.partition('if __name__ == "__main__":\n')
    with pytest.raises(SystemExit) as ended:
        exec("if True:\n" + call, vars(example))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize("name", SHAPES)
def test_an_example_gives_the_same_tokens_both_ways_and_prefills_few_with_handles(
    name: str, load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(load(name)) == 0
    out = capsys.readouterr().out
    document = json.loads(out.splitlines()[-1])
    reused, prefilled = document["tokens_reused"], document["tokens_prefilled"]
    assert document["name"] == name
    assert document["answers_equal"] is True
    assert reused["text"] == 0
    assert reused["kv"] + prefilled["kv"] == prefilled["text"], "the context is the same"
    assert prefilled["text"] > SHAPES[name] * prefilled["kv"]
    if name == "resume_after_restart":
        assert "The first process ended with -9; to be done: ('cliff',)" in out
        assert "Tokens computed again after the restart: 0" in out


def test_one_other_token_fails_an_example(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    load("map_reduce")
    compared = sys.modules["compared"]
    usage = {"node": "n", "ttft_ms": 1.0, "num_context": 2, "num_reused": 0, "num_prefilled": 2}
    handles, text = compared.Run({"answer": "yes"}, [usage]), compared.Run({"answer": "no"}, [usage])
    assert compared.report("planted", "tiny", handles, text, ["answer"]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["answers_equal"] is False


def test_a_model_that_is_not_there_is_one_line(
    load: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    example = load("map_reduce")
    sys.argv[-1] = "/no/such/model"
    assert start(example) == 2
    assert capsys.readouterr().err.startswith("ConfigError: ")
