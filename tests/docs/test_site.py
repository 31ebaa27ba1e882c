"""The site that ``make docs`` builds: without a warning, whole, and without a request to anybody else."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import aaflow_langgraph

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / ".mkdocs.yml"
PAGES = sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md"))
FETCHED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*\bhref=\"?(?:https?:)?//"
)


def _listed(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from _listed(inner)


def test_the_navigation_lists_every_page_once() -> None:
    nav = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["nav"]
    assert sorted(_listed(nav)) == PAGES, "name each page of docs/ in the nav of .mkdocs.yml"


@pytest.mark.parametrize("name", aaflow_langgraph.__all__)
def test_every_public_name_is_in_the_reference(name: str) -> None:
    text = (ROOT / "docs/reference/api.md").read_text(encoding="utf-8")
    assert f"::: aaflow_langgraph.{name}\n" in text, "name it in docs/reference/api.md"


@pytest.mark.skipif(importlib.util.find_spec("mkdocstrings") is None, reason="needs pip install -e '.[docs]'")
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(CONFIG), "-d", str(tmp_path)]
    built = subprocess.run(
        command, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    for page in PAGES:
        html = (tmp_path / page.replace("README.md", "index.md")).with_suffix(".html").read_text(encoding="utf-8")
        assert "<h1" in html, page
        assert FETCHED.search(html) is None, page
    reference = (tmp_path / "reference/api.html").read_text(encoding="utf-8")
    for name in aaflow_langgraph.__all__:
        assert f'id="aaflow_langgraph.{name}"' in reference, name
