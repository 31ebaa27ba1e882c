"""Arrows point down only. Read from the source, imports inside functions and under TYPE_CHECKING included."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

PACKAGE = "aaflow_langgraph"
ROOT = Path(__file__).parents[2] / PACKAGE

# A unit is a module or a folder right below the package; it may import itself and what stands in lower rows.
ROWS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "_cache_dir"}),
    frozenset(
        {
            "model",
            "handle",
            "composite",
            "composition",
            "hashing",
            "results",
            "tensors",
            "_directory",
            "assets",
            "project",
            "_wheel",
            "_gguf",
            "threads",
            "native",
        }
    ),
    frozenset({"index", "pool", "engine", "evict", "compose"}),
    frozenset(
        {
            *("broker", "generation", "inflight", "journal", "keeper", "lease", "movements", "nearest", "recipes"),
            *("requests", "session", "store", "tail", "composer", "composing", "admission", "compaction"),
        }
    ),
    frozenset({"graph", "checkpoint", "chat", "testing", "bench", "inspection", "metrics", "explain", "lint"}),
    frozenset({"studio", "cli", "agents"}),
)
# Units of one row that may know each other: values are built of values, the broker's parts of each other; the index
# records allocations (pure numbers, no bytes) and candidates for eviction.
NEIGHBOURS = frozenset(
    {
        ("handle", "model"),
        ("bench", "chat"),
        ("hashing", "model"),
        ("hashing", "handle"),
        ("composite", "handle"),
        ("composition", "composite"),
        ("composition", "handle"),
        ("composition", "model"),
        ("composite", "hashing"),
        ("results", "handle"),
        ("assets", "_wheel"),
        ("results", "errors"),
        ("index", "evict"),
        ("compose", "engine"),
        ("broker", "composing"),
        ("composing", "journal"),
        ("composing", "nearest"),
        ("composing", "session"),
        ("composing", "recipes"),
        ("composing", "requests"),
        ("composing", "store"),
        ("composer", "recipes"),
        ("composer", "session"),
        ("requests", "composer"),
        ("index", "pool"),
        ("pool", "evict"),
        ("broker", "journal"),
        ("broker", "nearest"),
        ("broker", "requests"),
        ("broker", "keeper"),
        ("broker", "movements"),
        ("store", "movements"),
        ("movements", "journal"),
        ("broker", "recipes"),
        ("broker", "store"),
        ("compaction", "store"),
        ("keeper", "compaction"),
        ("requests", "admission"),
        ("requests", "generation"),
        ("requests", "inflight"),
        ("requests", "journal"),
        ("requests", "nearest"),
        ("requests", "recipes"),
        ("requests", "session"),
        ("requests", "store"),
        ("recipes", "nearest"),
        ("keeper", "store"),
        ("recipes", "store"),
        ("session", "inflight"),
        ("session", "store"),
        ("session", "tail"),
        ("store", "lease"),
        ("tail", "store"),
        ("bench", "graph"),  # it measures a graph
        ("bench", "checkpoint"),
        ("inspection", "checkpoint"),
        ("inspection", "metrics"),
        ("graph", "checkpoint"),
        ("chat", "graph"),
        ("checkpoint", "graph"),
        ("testing", "graph"),
        ("testing", "checkpoint"),
        ("testing", "lint"),
        ("testing", "explain"),
        ("explain", "inspection"),
        ("lint", "explain"),
        ("lint", "graph"),
        ("lint", "inspection"),
        ("studio", "cli"),
        ("cli", "studio"),
    }
)
FORBIDDEN: tuple[tuple[str, frozenset[str]], ...] = (
    ("index", frozenset({"torch", "transformers"})),
    ("evict", frozenset({"torch", "transformers", "redis"})),
    ("pool", frozenset({"redis", "transformers"})),
    ("engine", frozenset({"redis"})),
    ("model", frozenset({"torch", "transformers", "redis"})),
    ("errors", frozenset({"torch", "transformers", "redis"})),
)
KNOWS_LANGGRAPH = frozenset({"agents", "graph", "chat", "checkpoint", "studio", "bench", "lint"})

# Where the name to import is not the name to install.
DISTRIBUTIONS = {"langchain_core": "langchain-core", "typing_extensions": "typing-extensions"}

# What stands in templates/ is not of the package: it is written into the user's projects. The servers of peers run in an
# environment of theirs and import nothing of ours (tests/unit/test_peers.py).
FILES = sorted(
    path
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] != "templates"
    and path.relative_to(ROOT).parts[:3] != ("bench", "peers", "servers")
)


def unit_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0].removesuffix(".py")


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Dotted names that a file imports; relative ones made absolute, ``from x import y`` as both ``x`` and ``x.y``."""
    found: set[str] = set()
    folder = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folder[: len(folder) - node.level + 1]) + "." if node.level else ""
            module = (base + (node.module or "")).rstrip(".")
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
    return frozenset(found)


def own_units(imports: frozenset[str]) -> set[str]:
    return {name.split(".")[1] for name in imports if name.startswith(f"{PACKAGE}.")} - {"__version__"}


def row_of(unit: str) -> int:
    return next(number for number, units in enumerate(ROWS) if unit in units)


def test_every_unit_has_a_row() -> None:
    known = frozenset().union(*ROWS) | {"__init__"}
    assert {unit_of(path) for path in FILES} <= known


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_down(path: Path) -> None:
    unit = unit_of(path)
    if unit == "__init__":
        return
    for imported in own_units(imports_of(path)) - {unit}:
        assert row_of(imported) < row_of(unit) or (unit, imported) in NEIGHBOURS, f"{unit} may not import {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_graph_side_knows_langgraph_and_nothing_forbidden_is_imported(path: Path) -> None:
    unit = unit_of(path)
    roots = {name.split(".")[0] for name in imports_of(path)}
    if unit not in KNOWS_LANGGRAPH:
        assert not {root for root in roots if root.startswith(("langgraph", "langchain"))}
    for forbidden_in, names in FORBIDDEN:
        if unit == forbidden_in:
            assert not roots & names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_loads_code_from_tensors_or_uses_pickle(path: Path) -> None:
    imported = imports_of(path)
    assert not {name.split(".")[0] for name in imported} & {"pickle", "cPickle", "dill", "cloudpickle", "joblib"}
    assert "torch.load" not in imported
    assert "torch.load(" not in path.read_text(encoding="utf-8")


def own_files(path: Path) -> set[Path]:
    """Files of the package that importing ``path`` runs, itself included, parent packages but the root too."""
    seen: set[Path] = set()
    todo = [path]
    while todo:
        path = todo.pop()
        if path in seen or not path.exists():
            continue
        seen.add(path)
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1:
                stem = ROOT.joinpath(*parts[1:])
                todo += [stem.with_suffix(".py"), stem / "__init__.py", stem.parent / "__init__.py"]
        todo = [file for file in todo if file != ROOT / "__init__.py"]
    return seen


@pytest.mark.parametrize("path", [path for path in FILES if unit_of(path) in ("index", "evict")], ids=lambda p: p.name)
def test_the_index_reaches_no_torch_through_others_either(path: Path) -> None:
    for file in own_files(path):
        assert not {name.split(".")[0] for name in imports_of(file)} & {"torch", "transformers"}, file


def test_every_third_party_import_is_declared() -> None:
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].lower() for line in lines}
    roots = {name.split(".")[0] for path in FILES for name in imports_of(path)} - {PACKAGE} - sys.stdlib_module_names
    assert {DISTRIBUTIONS.get(root, root) for root in roots} <= declared


def test_every_line_of_the_tested_set_is_one_pin() -> None:
    for line in (ROOT.parent / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert not line or line.startswith("#") or re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line), line
