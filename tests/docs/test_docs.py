"""Every Python block of the README and of docs/ runs, and prints what the page says it prints.

The blocks of one page run in order in one module. A ``text`` block right behind a ``python`` block is its output, with
``...`` for what differs from machine to machine. Pages that load the demo model are slow tests.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.real import real_cache  # noqa: F401

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n+^```text\n(?P<output>.*?)^```$)?", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?P<target>[^)#\s]+)(?:#[^)]*)?\)")


def _page(path: Path) -> object:
    name = path.relative_to(ROOT).as_posix()
    marks = [pytest.mark.slow] if "demo_model" in path.read_text(encoding="utf-8") else []
    return pytest.param(path, id=name, marks=marks)


@pytest.mark.parametrize("path", [_page(path) for path in PAGES if "```python" in path.read_text(encoding="utf-8")])
def test_the_blocks_of_a_page_run_and_print_what_it_says(
    path: Path, real_cache: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = path.read_text(encoding="utf-8")
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # LangGraph resolves a state's annotations in its module
    monkeypatch.chdir(tmp_path)
    checker = doctest.OutputChecker()
    try:
        for block in BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            code = compile("\n" * line + block["code"], str(path), "exec", dont_inherit=True)
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(code, module.__dict__)
            if block["output"] is not None:
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                assert checker.check_output(block["output"], printed.getvalue(), flags), printed.getvalue()
    finally:
        for value in list(vars(module).values()):
            if type(value).__name__ == "KVBroker":
                value.close()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_to_files_lead_somewhere(path: Path) -> None:
    for link in LINK.finditer(path.read_text(encoding="utf-8")):
        if not link["target"].startswith(("http:", "https:", "mailto:")):
            assert (path.parent / link["target"]).exists(), link["target"]


def test_no_block_is_of_a_kind_that_nobody_runs_or_reads() -> None:
    kinds = {kind for path in PAGES for kind in re.findall(r"^```(\w+)$", path.read_text(encoding="utf-8"), re.M)}
    assert kinds <= {"python", "text", "bash", "json"}
