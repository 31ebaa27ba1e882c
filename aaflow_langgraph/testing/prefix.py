"""``assert_prefix_stable``: a test of an app's prompts. Needs no weights beyond those that the app has loaded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aaflow_langgraph.explain.report import Cause


def assert_prefix_stable(
    graph: Any, inputs: Any = None, *, answers: Sequence[str] = (), ignore: Collection[Cause] = ()
) -> None:
    """Run ``graph`` dry, twice two turns under a clock that goes on by days, and fail where its prompts are not append-only.

    The nodes and tools of the graph run for real; its models say what was written before. Every open broker of the process
    is dry meanwhile, so nothing else may use one.

    Args:
        graph: A LangGraph graph, compiled or not, or a function that returns one.
        inputs: One input, or a list of them, one for each turn. None makes some up from the graph's schema.
        answers: What the models say, in turn; the last one from then on.
        ignore: Causes that are meant to be: names as in ``MissReport.cause``.

    Raises:
        AssertionError: Names each node or edge, the cause, the first difference and the mend.
        ConfigError: ``graph`` is none, the input is none, an ignored cause is none, or no broker was asked for anything.
            What the graph's nodes raise passes through.
    """
    __tracebackhide__ = True
    from aaflow_langgraph.lint.check import find_breaks
    from aaflow_langgraph.lint.show import breaks_text, check_causes

    ignored = check_causes(ignore)
    found = [one for one in find_breaks(graph, inputs, answers=answers) if one.cause not in ignored]
    if found:
        raise AssertionError(breaks_text(found))
