"""Why prompts miss: ``explain_miss`` compares the requests of a broker's journal with what was known.

Names load on first use: a report and its table need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aaflow_langgraph.explain.miss import explain_miss as explain_miss
    from aaflow_langgraph.explain.miss import explain_request as explain_request
    from aaflow_langgraph.explain.report import CAUSES as CAUSES
    from aaflow_langgraph.explain.report import Cause as Cause
    from aaflow_langgraph.explain.report import Difference as Difference
    from aaflow_langgraph.explain.report import MissReport as MissReport
    from aaflow_langgraph.explain.show import misses_document as misses_document
    from aaflow_langgraph.explain.show import misses_table as misses_table

_HOMES = {
    "CAUSES": "report",
    "Cause": "report",
    "Difference": "report",
    "MissReport": "report",
    "explain_miss": "miss",
    "explain_request": "miss",
    "misses_document": "show",
    "misses_table": "show",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
