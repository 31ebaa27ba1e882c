"""``aaflow lint``: starts an app twice and shows what it renders differently. Light: the starts load what is heavy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.lint.finding import PrefixBreak, worst
from aaflow_langgraph.lint.show import breaks_document, breaks_text, check_causes

_SAID = 2
"""Exit status of a start that said on stderr what is wrong."""


def lint(app: str, given: str | None, answers: Sequence[str], ignore: Sequence[str], *, as_json: bool) -> int:
    """Print findings; 1 when there are some, 0 without, 2 when the app cannot be started.

    Raises:
        ConfigError: ``given`` is no JSON, or an ignored cause is none. Way out: fail.
    """
    ignored = check_causes(ignore)
    if given is not None:
        try:
            json.loads(given)
        except ValueError as error:
            raise ConfigError(f"--input is no JSON ({error}): {given[:60]!r}") from error
    options = [
        *(("--input", given) if given is not None else ()),
        *(part for one in answers for part in ("--answer", one)),
    ]
    with tempfile.TemporaryDirectory(prefix="aaflow-lint-") as folder:
        first, second = Path(folder, "first.json"), Path(folder, "second.json")
        for seed, out, more in (("1", first, []), ("2", second, ["--against", str(first)])):
            status = _start(seed, [app, str(out), *more, *options])
            if status == _SAID:
                return 2
            if status or not out.exists():
                raise ConfigError(f"{app} ended with status {status} while it was looked at; what it said is above")
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in (first, second)]
    found = worst(PrefixBreak.from_dict(one) for document in documents for one in document["found"])
    found = tuple(one for one in found if one.cause not in ignored)
    requests: list[dict[str, Any]] = documents[1]["requests"]
    nodes = list(dict.fromkeys(request["node"] for request in requests))
    if as_json:
        print(json.dumps(breaks_document(app, len(requests), nodes, found)))
    elif found:
        print(breaks_text(found))
    else:
        print(
            f"append-only: {len(requests)} requests of {len(nodes)} nodes ({', '.join(nodes)}) in two turns, started twice"
        )
    return 1 if found else 0


def _start(seed: str, arguments: Sequence[str]) -> int:
    surroundings = {**os.environ, "PYTHONHASHSEED": seed}
    command = [sys.executable, "-m", "aaflow_langgraph.lint.start", *arguments]
    return subprocess.run(command, env=surroundings, check=False).returncode
