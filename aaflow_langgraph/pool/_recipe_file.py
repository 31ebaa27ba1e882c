"""One recipe as one JSON file. Knows the format; knows no directories."""

from __future__ import annotations

import json
from typing import Any, get_args

from aaflow_langgraph.composition import composition_fields, composition_from, read_composition
from aaflow_langgraph.errors import ConfigError, IntegrityError, RecipeMissing
from aaflow_langgraph.hashing import digest, token_bytes
from aaflow_langgraph.model import Operator, Recipe, Span, Turn
from aaflow_langgraph.pool._safetensors import DIGEST

FORMAT_VERSION = 2
"""2 for a recipe that was composed; one that was not is written as 1, which earlier versions read."""

MAX_BYTES = 64 << 20
"""Checked before a file is parsed: a few million token ids and turns."""


def encode(recipe: Recipe) -> bytes:
    """The file. The seal tells a damaged one: a ``kv_id`` commits to all tokens, and a recipe holds only its own.

    Raises:
        ConfigError: A field cannot be right, or the file would be larger than a reader accepts. Way out: fail.
    """
    try:
        written = _encode(recipe)
        same = decode(written) == recipe
    except (IntegrityError, TypeError, OverflowError) as error:
        raise ConfigError(f"not a recipe that can be stored: {error}") from error
    if not same:
        raise ConfigError("not a recipe that can be stored: it would not be read back as it is")
    return written


def decode(text: bytes) -> Recipe:
    """The recipe of a file.

    Raises:
        IntegrityError: The file is damaged. Way out: fail; whoever reads it quarantines.
        RecipeMissing: A newer version wrote it. Way out: upgrade, or run the node that wrote the handle again.
    """
    if len(text) > MAX_BYTES:
        raise IntegrityError(f"a recipe of {len(text)} bytes; at most {MAX_BYTES}")
    try:
        stored = json.loads(text)
        if type(stored["version"]) is int and stored["version"] > FORMAT_VERSION:
            raise RecipeMissing(f"written in format {stored['version']}, this version reads {FORMAT_VERSION}: upgrade")
        recipe = Recipe(
            kv_id=stored["kv_id"],
            namespace=stored["namespace"],
            parent=stored["parent"],
            start=stored["start"],
            token_ids=tuple(stored["token_ids"]),
            num_pending=stored["num_pending"],
            turns=tuple(Turn(role, Span(start, stop), is_open) for role, start, stop, is_open in stored["turns"]),
            operator=stored["operator"],
            composition=read_composition(stored["composition"]) if "composition" in stored else None,
        )
        _require_types(recipe)
        if _encode(recipe) != text:
            raise IntegrityError("its seal or form does not agree with its fields")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"no recipe: {error!r:.200}") from error
    return recipe


def _encode(recipe: Recipe) -> bytes:
    made = recipe.composition
    fields: dict[str, Any] = {
        "version": 1 if made is None else 2,
        "kv_id": recipe.kv_id,
        "namespace": recipe.namespace,
        "parent": recipe.parent,
        "start": recipe.start,
        "num_pending": recipe.num_pending,
        "operator": recipe.operator,
        "turns": [[turn.role, turn.content.start, turn.content.stop, turn.open] for turn in recipe.turns],
    }
    if made is not None:
        fields["composition"] = composition_fields(made)
    seal = digest("recipe", json.dumps(fields), token_bytes(recipe.token_ids))
    return json.dumps({**fields, "token_ids": list(recipe.token_ids), "seal": seal}, separators=(",", ":")).encode()


def _require_types(recipe: Recipe) -> None:
    """JSON says little about types: true is a number there, and ids become part of paths."""
    names = (recipe.kv_id, recipe.namespace, *(() if recipe.parent is None else (recipe.parent,)))
    numbers = (recipe.start, recipe.num_pending, *recipe.token_ids)
    numbers += tuple(number for turn in recipe.turns for number in (turn.content.start, turn.content.stop))
    if not all(isinstance(name, str) and DIGEST.fullmatch(name) for name in names):
        raise IntegrityError("ids are 64 lower-case hex digits each")
    if not all(type(number) is int and number >= 0 for number in numbers) or recipe.num_pending > recipe.stop:
        raise IntegrityError(
            "positions, counts and token ids are whole numbers from 0, pending ones part of the tokens"
        )
    if not all(isinstance(turn.role, str) and type(turn.open) is bool for turn in recipe.turns):
        raise IntegrityError("a turn is a role, two positions, and whether it is open")
    if recipe.composition is not None:
        composition_from(composition_fields(recipe.composition), recipe.start, recipe.stop)
    if (recipe.composition is None) != (recipe.operator != "compose"):
        raise IntegrityError("a compose says what was composed, and nothing else does")
    if recipe.operator not in get_args(Operator):
        raise IntegrityError(f"operator {recipe.operator!r:.50} is none of {', '.join(get_args(Operator))}")
