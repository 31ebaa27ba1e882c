"""Documents out of the country factbook, and questions whose answers are fields of them: what ``bench compose`` joins and asks.

Knows the factbook's form and BM25; knows no model.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from aaflow_langgraph.errors import ConfigError

NUM_DOCUMENTS = 5
_SECTION_CHARS = 1100
"""Of a document: 300 to 500 tokens of the demo model, figures being the dearer text."""
_LEAST_CHARS = 600

_QUESTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("What is the capital of {}?", ("Government", "Capital", "name")),
    ("What is the highest point of {}?", ("Geography", "Elevation", "highest point")),
    ("How long is the coastline of {}?", ("Geography", "Coastline")),
    ("What is the internet country code of {}?", ("Communications", "Internet country code")),
    ("What is the national holiday of {}?", ("Government", "National holiday")),
    ("What is the lowest point of {}?", ("Geography", "Elevation", "lowest point")),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A question, what a right answer contains, and the documents that were found for it, best first."""

    question: str
    gold: str
    documents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Section:
    country: str
    category: str
    headings: tuple[str, ...]
    text: str


def cases(folder: Path, count: int, seed: int = 0) -> list[Case]:
    """``count`` questions of different kinds about different countries, each with the sections that BM25 finds for it.

    Where the section that holds the answer is not among them, it takes the place of the last.

    Raises:
        ConfigError: bm25s is not installed, or the factbook is too small. Way out: as the message says.
    """
    if find_spec("bm25s") is None:
        raise ConfigError("documents are retrieved with bm25s: pip install 'aaflow-langgraph[demo]'")
    import bm25s

    profiles = _profiles(folder)
    sections = [section for country, profile in profiles.items() for section in _sections(country, profile)]
    if len(sections) < NUM_DOCUMENTS:
        raise ConfigError(f"{folder} has {len(sections)} sections of text; at least {NUM_DOCUMENTS} are needed")
    index = bm25s.BM25()
    index.index(_tokens([section.text for section in sections]), show_progress=False)
    countries = sorted(profiles)
    random.Random(seed).shuffle(countries)
    found: list[Case] = []
    for country in countries:
        template, path = _QUESTIONS[len(found) % len(_QUESTIONS)]
        gold = _gold(_field(profiles[country], path))
        home = next(
            (s for s in sections if (s.country, s.category) == (country, path[0]) and path[1] in s.headings), None
        )
        if home is None or len(gold) < 2 or gold not in home.text:
            continue
        question = template.format(country)
        numbers, _ = index.retrieve(_tokens([question]), k=NUM_DOCUMENTS, show_progress=False)
        best = [sections[number] for number in numbers[0]]
        if home not in best:
            best[-1] = home
        found.append(Case(question, gold, tuple(section.text for section in best)))
        if len(found) == count:
            return found
    raise ConfigError(f"{folder} has answers to {len(found)} of the {count} questions asked for; ask fewer")


def long_documents(
    folder: Path, encode: Callable[[str], Sequence[int]], num_tokens: int, count: int = 4
) -> list[tuple[int, ...]]:
    """The first ``num_tokens`` tokens of ``count`` country profiles.

    Raises:
        ConfigError: There are not as many profiles of that length. Way out: ask for fewer tokens.
    """
    found: list[tuple[int, ...]] = []
    for country, profile in _profiles(folder).items():
        text = "\n".join(section.text for section in _sections(country, profile))
        if len(text) < 2 * num_tokens:  # encoding takes longer than this look
            continue
        ids = tuple(encode(text[: 8 * num_tokens]))[:num_tokens]
        if len(ids) == num_tokens:
            found.append(ids)
        if len(found) == count:
            return found
    raise ConfigError(
        f"{folder} has {len(found)} documents of {num_tokens} tokens, {count} are needed; ask for fewer tokens"
    )


def _tokens(texts: list[str]) -> Any:
    import bm25s

    return bm25s.tokenize(texts, stopwords="en", show_progress=False)


def _profiles(folder: Path) -> dict[str, dict[str, Any]]:
    profiles: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json")):
        profile = json.loads(path.read_text(encoding="utf-8"))
        name = _field(profile, ("Government", "Country name", "conventional short form"))
        if name and name != "none":
            profiles[name] = profile
    return profiles


def _sections(country: str, profile: dict[str, Any]) -> Iterator[_Section]:
    """Runs of fields of one category, as long as a document is."""
    for category, fields in profile.items():
        headings: list[str] = []
        text = ""
        for heading, value in fields.items():
            words = f"{heading}: {_flat(value)}"[: _SECTION_CHARS // 2]
            if len(text) + len(words) > _SECTION_CHARS:
                yield _Section(country, category, tuple(headings), text)
                headings, text = [], ""
            text = f"{text}\n{words}" if text else f"{country}, {category}\n{words}"
            headings.append(heading)
        if len(text) >= _LEAST_CHARS:
            yield _Section(country, category, tuple(headings), text)


def _gold(text: str) -> str:
    """The number a field begins with, or its words up to the first figure or aside."""
    match = re.match(r"[\d,.]*\d|[^\d;(,]+", text)
    return match[0].strip() if match else ""


def _field(profile: dict[str, Any], path: Sequence[str]) -> str:
    value: Any = profile
    for name in path:
        value = value.get(name, {}) if isinstance(value, dict) else {}
    return _flat(value)


def _flat(value: Any) -> str:
    """A field and its sub-fields as one line without markup."""
    if isinstance(value, str):
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", value)).split())
    if isinstance(value, dict):
        parts = [(name, _flat(item)) for name, item in value.items()]
        return "; ".join(text if name == "text" else f"{name}: {text}" for name, text in parts if text)
    return ""
