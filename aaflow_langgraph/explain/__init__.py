"""Why prompts miss: ``explain_miss`` compares the requests of a broker's journal with what was known."""

from aaflow_langgraph.explain.miss import explain_miss, explain_request
from aaflow_langgraph.explain.report import CAUSES, Cause, Difference, MissReport
from aaflow_langgraph.explain.show import misses_document, misses_table

__all__ = [
    "CAUSES",
    "Cause",
    "Difference",
    "MissReport",
    "explain_miss",
    "explain_request",
    "misses_document",
    "misses_table",
]
