"""The scripts of the Redis index as text. Knows files and the names of keys; knows no server.

A script says once which keys it uses, in the line ``local a, b = unpack(KEYS)``: the same line declares them to the server.
``-- include: part`` stands for ``scripts/parts/part.lua``, and names of numbers stand for those of ``_NUMBERS``.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from aaflow_langgraph.index._wire import NAMED_BLOCKS
from aaflow_langgraph.model import BLOCK_TOKENS

_KEYS = re.compile(r"^local ([\w,\s]+?) = (?:unpack\(KEYS\)|KEYS\[1\])$", re.MULTILINE)
_NUMBERS = {"NAMED_BLOCKS": NAMED_BLOCKS, "BLOCK_TOKENS": BLOCK_TOKENS}
_INCLUDE = re.compile(r"^-- include: (\w+)$", re.MULTILINE)


class ScriptText(NamedTuple):
    """One script, ready to be sent, and the short names of its keys in order."""

    text: str
    keys: tuple[str, ...]


@cache
def scripts() -> dict[str, ScriptText]:
    """Every script by name."""
    folder = files(__package__) / "scripts"
    parts = {part.name: part.read_text(encoding="utf-8") for part in (folder / "parts").iterdir()}
    found = {}
    for file in folder.iterdir():
        if file.name.endswith(".lua"):
            text = file.read_text(encoding="utf-8")
            declared = _KEYS.search(text)
            if declared is None:
                raise RuntimeError(f"script {file.name} declares no keys")
            text = _INCLUDE.sub(lambda match: parts[f"{match[1]}.lua"].rstrip("\n"), text)
            for name, number in _NUMBERS.items():
                text = text.replace(name, str(number))
            found[file.name.removesuffix(".lua")] = ScriptText(text, tuple(re.findall(r"\w+", declared[1])))
    return found
