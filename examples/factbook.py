"""Passages of the country factbook, BM25 over them, and questions whose answers are fields of it."""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bm25s

PASSAGE_CHARS = 700


@dataclass(frozen=True)
class Question:
    """A question generated from a field, and what a right answer must contain."""

    text: str
    gold: str


@dataclass(frozen=True)
class Passage:
    country: str
    heading: str
    text: str

    def __str__(self) -> str:
        return f"{self.country}, {self.heading}: {self.text}"


class Factbook:
    """Country profiles, searchable."""

    def __init__(self, folder: Path) -> None:
        self.countries: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.glob("*/*.json")):
            profile = json.loads(path.read_text(encoding="utf-8"))
            name = field(profile, "Government", "Country name", "conventional short form")
            if name and name != "none":
                self.countries[name] = profile
        self.passages = [
            Passage(name, f"{category}, {heading}", text[:PASSAGE_CHARS])
            for name, profile in self.countries.items()
            for category, fields in profile.items()
            for heading, value in fields.items()
            if (text := flat(value))
        ]
        self._index = bm25s.BM25()
        tokens = bm25s.tokenize([str(passage) for passage in self.passages], stopwords="en", show_progress=False)
        self._index.index(tokens, show_progress=False)

    def search(self, query: str, num_passages: int) -> list[Passage]:
        """The best passages, best first."""
        tokens = bm25s.tokenize(query, stopwords="en", show_progress=False)
        found, _ = self._index.retrieve(tokens, k=min(num_passages, len(self.passages)), show_progress=False)
        return [self.passages[number] for number in found[0]]

    def ask(self, template: str, country: str, *path: str) -> Question:
        """A question about ``country`` whose answer is the field at ``path``: its number, or its words up to one."""
        gold = re.match(r"[\d,.]*\d|[^\d;(,]+", field(self.countries[country], *path))
        if gold is None:
            raise LookupError(f"the factbook has no {' / '.join(path)} for {country}")
        return Question(template.format(country=country), gold[0].strip())


def field(profile: dict[str, Any], *path: str) -> str:
    """Plain text of one field; empty when the profile lacks it."""
    value: Any = profile
    for name in path:
        value = value.get(name, {})
    return flat(value)


def flat(value: Any) -> str:
    """A field and its sub-fields as one line without markup."""
    if isinstance(value, str):
        return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", value)).split())
    if isinstance(value, dict):
        parts = [(name, flat(item)) for name, item in value.items()]
        return "; ".join(text if name == "text" else f"{name}: {text}" for name, text in parts if text)
    return ""
