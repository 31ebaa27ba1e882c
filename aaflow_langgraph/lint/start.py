"""One start of an app in a process of its own: ``python -m aaflow_langgraph.lint.start``, for ``aaflow lint``.

A process of its own is loaded under the shifted clock and another hash seed, so that what an app decides while it is loaded,
and the order of its sets, is seen. stdout is kept for nobody: what the app prints goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import traceback
from pathlib import Path

# Loaded before the clock is shown: these keep the real one.
import langchain_core.messages  # noqa: F401
import transformers.utils.chat_template_utils  # noqa: F401

from aaflow_langgraph.errors import AAFlowError
from aaflow_langgraph.lint.app import load_app, runnable_graph, turns_of
from aaflow_langgraph.lint.check import START_S, usable_brokers
from aaflow_langgraph.lint.rendering import Request
from aaflow_langgraph.lint.run import Rendered, render
from aaflow_langgraph.lint.shift import ShiftedClock
from aaflow_langgraph.lint.weightless import weightless

USAGE = 2
"""Exit status when our message on stderr says it all. What an app raises ends the process with its own traceback."""


def main() -> int:
    """Run one start and write what was asked for as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("app")
    parser.add_argument("out", type=Path)
    parser.add_argument("--against", type=Path, default=None)
    parser.add_argument("--input", type=json.loads, default=None)
    parser.add_argument("--answer", action="append", default=[])
    arguments = parser.parse_args()
    # It warns of types in checkpoints; those of a look are read back by the process that wrote them.
    logging.getLogger("langgraph.checkpoint.serde.jsonplus").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            rendered = _started(arguments)
    except AAFlowError as error:
        if _is_of_the_app(error):
            raise
        sys.stderr.write(f"aaflow: {error}\n")
        return USAGE
    document = {
        "requests": [request.to_dict() for request in rendered.requests],
        "found": [one.to_dict() for one in rendered.found],
    }
    arguments.out.write_text(json.dumps(document), encoding="utf-8")
    return 0


def _started(arguments: argparse.Namespace) -> Rendered:
    against = None
    if arguments.against is not None:
        document = json.loads(arguments.against.read_text(encoding="utf-8"))
        against = [Request.from_dict(one) for one in document["requests"]]
    clock = ShiftedClock(0.0 if against is None else START_S)
    with weightless(), clock.shown(start=0 if against is None else 1):
        graph = runnable_graph(load_app(arguments.app))
        turns = turns_of(graph, arguments.input)
        return render(graph, turns, usable_brokers(), clock, answers=arguments.answer, against=against)


def _is_of_the_app(error: BaseException) -> bool:
    """Did it pass through a file that is not ours and not a library's?"""
    ours = Path(__file__).parents[1]
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    return any(
        ours not in file.parents
        and "site-packages" not in file.parts
        and not str(file).startswith(("<", sys.base_prefix))
        for file in files
    )


if __name__ == "__main__":
    sys.exit(main())
