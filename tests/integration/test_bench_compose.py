"""``aaflow bench compose`` on a tiny model and a small factbook: every rung is there, exact ones say what dense says."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from aaflow_langgraph import assets
from aaflow_langgraph.bench import questions
from aaflow_langgraph.bench.compose import correlations
from aaflow_langgraph.bench.permutations import DENSE, Rung, Seen, orders_of
from aaflow_langgraph.cli import main
from tests import tiny

WORDS = ["river", "stone", "market", "letter", "winter", "garden", "signal", "bridge", "copper", "island", "record"]


def profile(name: str, seed: int) -> dict[str, Any]:
    """A country as the factbook has it: sections of several fields, markup among them."""
    drawn = random.Random(seed)

    def prose(count: int) -> dict[str, str]:
        return {"text": " ".join(drawn.choices(WORDS, k=count))}

    return {
        "Introduction": {"Background": prose(32), "History": prose(32)},
        "Geography": {
            "Location": prose(32),
            "Coastline": {"text": f"{seed + 3},200 km"},
            "Elevation": {
                "highest point": {"text": f"Mount {name} {seed + 11} m"},
                "lowest point": {"text": "Deep Sea"},
            },
            "Terrain": prose(32),
        },
        "Government": {
            "Country name": {"conventional short form": {"text": name}},
            "Capital": {"name": {"text": f"<b>{name} City</b>"}},
            "National holiday": {"text": f"{name} Day, 1 May"},
            "Flag": prose(32),
        },
        "Communications": {"Internet country code": {"text": f".{name[:2].lower()}"}, "Broadcast media": prose(32)},
    }


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "book"
    (folder / "region").mkdir(parents=True)
    for seed, name in enumerate(("Arland", "Borland", "Corland", "Dorland", "Erland", "Forland")):
        (folder / "region" / f"{name}.json").write_text(json.dumps(profile(name, seed)), encoding="utf-8")
    monkeypatch.setattr(assets, "factbook", lambda: folder)
    monkeypatch.setattr(questions, "_SECTION_CHARS", 240)  # one token is one character here
    monkeypatch.setattr(questions, "_LEAST_CHARS", 60)
    return folder


def test_every_rung_has_a_row_and_those_that_recompute_everything_say_what_dense_says(
    tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, picture = tiny.save(tmp_path / "model", max_position_embeddings=6000), tmp_path / "compose.svg"
    sizes = ["--tokens", "1024", "--questions", "2", "--orders", "2", "--k", "0,5,5000", "--r", "0,0.2,1"]
    assert main(["bench", "compose", "--model", str(model), "--svg", str(picture), *sizes]) == 0
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["name"] == "bench compose"

    rows = {str(Rung(row["rung"], row["k"], row["r"])): row for row in document["rows"]}
    exact = {"dense", "suffix", "prefix", "legolink k=5000", "blend r=1"}
    loose = {"legolink k=0", "legolink k=5", "blend r=0", "blend r=0.2"}
    assert set(rows) == exact | loose | {"no context", "other documents", "zeroed", "random"}
    for name in exact:
        assert rows[name]["kl"] < 1e-5
        assert rows[name]["top1"] == 1
        assert rows[name]["nll_excess"] == pytest.approx(0, abs=1e-3)
        assert rows[name]["deviation"] is None
    for name in loose:
        assert rows[name]["composites"] == 4
        assert rows[name]["kl"] > 1e-5
        assert abs(rows[name]["nll_excess"]) > 1e-4
        assert 0 < rows[name]["deviation"] <= rows[name]["deviation_max"]
        assert rows[name]["cost_of_dense"] > 0
        assert 0 <= rows[name]["accuracy"] <= 1
    assert rows["no context"]["kl"] is None
    assert set(document["correlation"]["kl"]) == set(document["correlation"]["nll_excess"]) == {"all", *loose}

    costs = {cost["leg"]: cost for cost in document["cost"]}
    assert {name: cost["recomputed"] for name, cost in costs.items()} == {
        "dense": 1024,
        "suffix": 768,
        "blend r=1": 768,
        "blend r=0.15": 116,
        "legolink k=16": 48,
        "legolink k=64": 192,
        "re-rotation alone": 0,
        "re-rotation, nothing measured": 0,
    }
    assert all(cost["rounds"] == 5 and cost["cost_of_dense"] > 0 for cost in costs.values())
    assert picture.read_text(encoding="utf-8").count("legolink") >= 2


def test_a_question_comes_with_the_section_that_answers_it(book: Path) -> None:
    asked = questions.cases(book, 6)
    assert len({case.question.partition(" of ")[0] for case in asked}) == 6
    for case in asked:
        assert len(set(case.documents)) == 5
        assert any(case.gold in document for document in case.documents)
        assert not any("<b>" in document for document in case.documents)


def test_orders_are_different_ones_the_same_every_time() -> None:
    assert len(set(orders_of(120))) == 120
    assert orders_of(10)[0] == (0, 1, 2, 3, 4)
    assert orders_of(10) == orders_of(20)[:10]


def test_deviation_that_ranks_as_kl_does_correlates_with_it_by_one() -> None:
    rung = Rung("legolink", k=4)
    found = [(0.1, 1e-4, 0.9), (0.3, 2.0, 0.2), (0.2, 1e-3, 0.5)]
    seen = [
        one
        for at, (deviation, kl, nll) in enumerate(found)
        for one in (
            Seen(DENSE, 0, at, 1.0, 1.0, 0.0, True, 0.1, None, None, None),
            Seen(rung, 0, at, 1.0, 1.0, kl, True, nll, deviation, deviation, None),
        )
    ]
    assert correlations(seen)["kl"] == {"all": 1.0, "legolink k=4": 1.0}
    assert correlations(seen)["nll_excess"]["all"] == -1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--questions", "1"], "at least 2 questions"),
        (["--orders", "121"], "120 orders"),
        (["--questions", "99"], "6 of the 99"),
        (["--tokens", "40000"], "fewer tokens"),
        (["--svg", "/no/such/folder/x.svg"], "no folder"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, book: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    model = tiny.save(tmp_path / "model")
    assert main(["bench", "compose", "--model", str(model), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value"), [("--k", "a"), ("--k", "-1"), ("--r", "1.5"), ("--r", "nan"), ("--r", "x")]
)
def test_a_list_of_numbers_is_checked(option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "compose", option, value])
    assert "is no list" in capsys.readouterr().err
