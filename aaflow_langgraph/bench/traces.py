"""Prefix-block traces: who asked for which prefix, when. Reads files; knows no pool and no policy.

Two public formats, told apart by content:

* *request lines* (Mooncake): one JSON object a line with ``timestamp`` (ms) and ``hash_ids``, one id per 512-token block;
* *agent session* (kv-cache-tester): one JSON document with ``block_size``, and ``requests`` with ``t`` (s) and
  ``hash_ids``; an entry of type ``subagent`` has ``requests`` of its own. Its ``t`` is when the agent was done, and theirs
  count from its start, ``duration_ms`` earlier.

Ids are local to their file, and in a session to the model that a request asks: KV of one model is nothing to another. Ids
are chained: an id stands for a block *and all before it*, so that no id has two parents.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aaflow_langgraph.errors import ConfigError

REQUEST_LINE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival; each is the chain of its block ids, ids counted from 0 over all files."""

    name: str
    block_tokens: int
    requests: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        """Block references over all requests."""
        return sum(map(len, self.requests))


@dataclass(frozen=True, slots=True)
class _Request:
    where: str
    at_s: float
    scope: str
    hash_ids: tuple[int, ...]


def read(paths: Sequence[Path | str]) -> Trace:
    """Read trace files into one trace. Files start together at their own time 0; equal times keep the order of files.

    Raises:
        ConfigError: A file cannot be read or is no trace; the message names the file, the line or request, and why.
    """
    numbers: dict[tuple[Path, str, int], int] = {}
    parents: dict[int, int | None] = {}
    block_tokens = 0
    timed: list[tuple[float, tuple[int, ...]]] = []
    for path in map(Path, paths):
        tokens, requests = _read_file(path)
        if block_tokens not in (0, tokens):
            raise ConfigError(f"{path}: blocks of {tokens} tokens, those before have {block_tokens}; replay them apart")
        block_tokens = tokens
        num_before = len(timed)
        for request in requests:
            chain: list[int] = []
            parent = None
            for hash_id in request.hash_ids:
                block = numbers.setdefault((path, request.scope, hash_id), len(numbers))
                if parents.setdefault(block, parent) != parent or block in chain[-1:]:
                    raise ConfigError(
                        f"{path}, {request.where}: id {hash_id} stands behind two different blocks; ids must name prefixes"
                    )
                chain.append(block)
                parent = block
            timed.append((request.at_s, tuple(chain)))
        if len(timed) == num_before:
            raise ConfigError(f"{path}: no requests")
    timed.sort(key=lambda pair: pair[0])
    name = Path(paths[0]).name if len(paths) == 1 else f"{len(paths)} files, {Path(paths[0]).name} first"
    return Trace(name, block_tokens, tuple(chain for _, chain in timed))


def _read_file(path: Path) -> tuple[int, Iterable[_Request]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    first = next((line for line in text.splitlines() if line.strip()), "")
    try:
        lines = isinstance(json.loads(first), dict) and "requests" not in json.loads(first)
    except (ValueError, RecursionError):
        # A document over several lines, or a first line that is broken: a document's error names the line as well.
        lines = False
    if lines:
        return REQUEST_LINE_BLOCK_TOKENS, _request_lines(path, text)
    document = _parsed(path, text, 1)
    if not isinstance(document, dict) or not isinstance(document.get("requests"), list):
        raise ConfigError(
            f"{path}, line 1: neither request lines (timestamp, hash_ids) nor an agent session (block_size, requests)"
        )
    tokens = document.get("block_size")
    if type(tokens) is not int or tokens < 1:
        raise ConfigError(f"{path}: block_size is {tokens!r}, not a positive number")
    return tokens, _session(path, document["requests"])


def _request_lines(path: Path, text: str) -> Iterator[_Request]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            where = f"line {number}"
            record = _record(path, where, _parsed(path, line, number))
            yield _Request(where, _seconds(path, where, record, "timestamp") / 1000, "", _hash_ids(path, where, record))


def _session(path: Path, entries: list[Any]) -> Iterator[_Request]:
    todo = [(f"requests[{i}]", 0.0, entry) for i, entry in enumerate(entries)][::-1]
    while todo:
        where, start_s, entry = todo.pop()
        record = _record(path, where, entry)
        at_s = start_s + _seconds(path, where, record, "t")
        if record.get("type") != "subagent":
            yield _Request(where, at_s, str(record.get("model", "")), _hash_ids(path, where, record))
            continue
        nested = record.get("requests")
        if not isinstance(nested, list):
            raise ConfigError(f"{path}, {where}: a subagent without a list of requests")
        started_s = at_s - _seconds(path, where, record, "duration_ms") / 1000
        todo += [(f"{where}.requests[{i}]", started_s, entry) for i, entry in enumerate(nested)][::-1]


def _parsed(path: Path, text: str, first_line: int) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise ConfigError(f"{path}, line {line}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {first_line}: not JSON: {error}") from error


def _record(path: Path, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, {where}: a {type(value).__name__}, not an object")
    return value


def _seconds(path: Path, where: str, record: dict[str, Any], field: str) -> float:
    value = record.get(field)
    # The comparison is false for NaN and infinities, which JSON of Python's kind may hold.
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise ConfigError(f"{path}, {where}: {field} is {value!r}, not a time")
    return float(value)


def _hash_ids(path: Path, where: str, record: dict[str, Any]) -> tuple[int, ...]:
    value = record.get("hash_ids")
    if not isinstance(value, list) or not all(type(hash_id) is int for hash_id in value):
        raise ConfigError(f"{path}, {where}: hash_ids is not a list of whole numbers")
    return tuple(value)
