"""Causes in words: why a prompt missed, and what to change. Quotes nothing."""

from __future__ import annotations

from aaflow_langgraph.explain.report import Cause

_MENDS: dict[Cause, str] = {
    "none": "",
    "volatile": (
        "Put what changes behind what stays the same, at the end of the last user turn, or make it once and keep it in the state."
    ),
    "tools": "Bind the tools in one order everywhere: sort them by name where they are collected.",
    "think": "Use a chat template that keeps earlier reasoning, or switch thinking off.",
    "retokenised": (
        "Pass the handle (reads=...) or the AIMessage itself instead of its text, so that token ids are appended and text is not "
        "encoded again."
    ),
    "system": "Keep one system prompt, and put what differs from call to call or from agent to agent into the last user turn.",
    "history": "Append to the conversation instead of editing, trimming or summarising turns in the middle of it.",
    "namespace": "Serve both from one broker: KV is never shared between models, dtypes or tokenizers.",
    "tenant": "Nothing, if the tenants must not share; else open both brokers with the same tenant=.",
    "evicted": "Give the pool more room (pool_bytes=), or put a disk below it (disk=).",
    "off": "Open the broker with kv=True, which is the default.",
}


def mend_of(cause: Cause) -> str:
    """What to change, in one sentence."""
    return _MENDS[cause]


def why_differs(cause: Cause, what: str, role: str, position: int, num_behind: int) -> str:
    """A divergence in one sentence."""
    where = f"token {position:,}" + (f", in the {role} turn" if role else "")
    behind = f"{num_behind:,} tokens behind it were prefilled again"
    if cause == "volatile":
        return f"{what} differs at {where}; {behind}"
    if cause == "tools":
        return f"{what} at {where}; {behind}"
    if cause == "think":
        return f"{what} is there on one side only, at {where}; {behind}"
    if cause == "retokenised":
        return f"{what} at {where}; {behind}"
    return f"{what} differs at {where}; {behind}"
