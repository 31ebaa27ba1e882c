"""Why prompts miss: ``explain_miss`` compares the requests of a broker's journal with what was known."""

from aaflow_langgraph.explain.report import CAUSES, Cause, Difference, MissReport

__all__ = ["CAUSES", "Cause", "Difference", "MissReport"]
