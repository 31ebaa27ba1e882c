"""What the package promises by name: a short sorted list, twins of both colours, errors with a way out."""

from __future__ import annotations

import inspect
import subprocess
import sys

import aaflow_langgraph
from aaflow_langgraph import KVBroker, errors

PUBLIC = [
    "AAFlowError",
    "Generation",
    "KVBranches",
    "KVBroker",
    "KVChannel",
    "KVChatModel",
    "KVCheckpointSaver",
    "KVCompose",
    "KVComposite",
    "KVHandle",
    "KVMessagesState",
    "Sampling",
    "TransformersEngine",
    "Usage",
    "compose_node",
    "explain_miss",
    "generate_node",
    "kv_state",
    "prefill_node",
]


def test_the_public_names_are_these_in_order() -> None:
    assert aaflow_langgraph.__all__ == PUBLIC
    assert sorted(aaflow_langgraph.__all__) == aaflow_langgraph.__all__
    for name in PUBLIC:
        assert getattr(aaflow_langgraph, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(aaflow_langgraph, "KVCache")


def test_importing_a_handle_does_not_import_torch() -> None:
    code = "import sys, aaflow_langgraph as a; a.KVHandle; a.AAFlowError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def twins() -> list[str]:
    return [name for name in vars(KVBroker) if inspect.iscoroutinefunction(getattr(KVBroker, name))]


def test_every_async_method_has_a_sync_twin_with_the_same_signature() -> None:
    assert len(twins()) >= 8
    for name in twins():
        assert name.startswith("a"), f"{name} is async without the prefix"
        ours, theirs = getattr(KVBroker, name), getattr(KVBroker, name[1:])
        assert inspect.signature(ours) == inspect.signature(theirs), name
        assert not inspect.iscoroutinefunction(theirs)


def test_every_operator_comes_in_both_colours() -> None:
    operators = {"materialize", "append", "fork", "evict", "prefill", "generate", "lease", "release", "check", "close"}
    assert {f"a{name}" for name in operators} <= set(twins())


def test_every_error_has_a_way_out_and_stands_in_the_drawn_tree() -> None:
    tree = [e for e in vars(errors).values() if inspect.isclass(e) and issubclass(e, errors.AAFlowError)]
    assert len(tree) > 10
    for error in tree:
        assert error.recovery in ("retry", "recompute", "fail")
        assert error.__name__ in (errors.__doc__ or "")
        # LangGraph retries plain Exception and ConnectionError subclasses: only what says "retry" may be one of those.
        retried = not issubclass(error, ValueError | LookupError | RuntimeError | OSError) or issubclass(
            error, ConnectionError
        )
        assert retried == (error.recovery == "retry") or error is errors.AAFlowError
