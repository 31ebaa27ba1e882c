"""From ``module.py:graph`` to a graph that can be run without leaving anything behind. Knows LangGraph and importlib."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.pregel import Pregel

from aaflow_langgraph.errors import ConfigError

QUESTION = "What can be said about this?"
"""What a default input asks where the graph takes text; a conversation goes on with ``GO_ON``."""
GO_ON = "And what else can be said about it?"


def load_app(app: str) -> Any:
    """The object that ``"path/to/module.py:name"`` or ``"package.module:name"`` names.

    Raises:
        ConfigError: It is no such name, there is no such file or module, or no such object in it: says which there are. Way
            out: fail. What the app raises while it is imported passes through, with its own traceback.
    """
    where, colon, name = app.rpartition(":")
    if not colon or not where.strip() or not name.isidentifier():
        raise ConfigError(f"{app!r:.200} names no app: write module.py:graph or package.module:graph")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    if not hasattr(module, name):
        graphs = sorted(key for key, value in vars(module).items() if isinstance(value, Pregel | StateGraph))
        raise ConfigError(f"{where} has no {name!r}; its graphs are: {', '.join(graphs) or 'none'}")
    return getattr(module, name)


def runnable_graph(graph: Any) -> Pregel[Any, Any, Any, Any]:
    """A compiled copy that keeps its checkpoints in memory. Takes a graph, a builder, or a function that returns one.

    Raises:
        ConfigError: It is none of these. Way out: fail.
    """
    if inspect.isfunction(graph) and not any(
        parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        for parameter in inspect.signature(graph).parameters.values()
    ):
        graph = graph()
    if isinstance(graph, StateGraph):
        compiled: Pregel[Any, Any, Any, Any] = graph.compile(checkpointer=InMemorySaver())
        return compiled
    if isinstance(graph, Pregel):
        return graph.copy({"checkpointer": InMemorySaver()})
    raise ConfigError(
        f"a LangGraph graph is needed, compiled or not, or a function without arguments that returns one; got "
        f"{type(graph).__name__}"
    )


def turns_of(graph: Pregel[Any, Any, Any, Any], inputs: Any) -> list[Any]:
    """The inputs of two turns or more: those that were given, one given input twice, or made up from the graph's schema.

    Raises:
        ConfigError: ``inputs`` is neither an object nor a list of objects. Way out: fail.
    """
    if inputs is None:
        return _made_up(graph)
    if isinstance(inputs, Mapping):
        return [inputs, inputs]
    if isinstance(inputs, Sequence) and not isinstance(inputs, str | bytes) and inputs:
        wrong = [one for one in inputs if not isinstance(one, Mapping)]
        if not wrong:
            return list(inputs)
    raise ConfigError(
        f"inputs are one input of the graph (a dict), or a list of them, one for each turn; got {inputs!r:.100}"
    )


def _made_up(graph: Pregel[Any, Any, Any, Any]) -> list[Any]:
    """One input for each of two turns, from the types of the graph's input: text, numbers and messages."""
    schema = graph.builder.input_schema if isinstance(graph, CompiledStateGraph) else type(None)
    hints = get_type_hints(schema)
    turns = []
    for text in (QUESTION, GO_ON):
        made: dict[str, Any] = {key: _DEFAULTS[kind] for key, kind in hints.items() if kind in _DEFAULTS}
        if "messages" in hints:
            made["messages"] = [{"role": "user", "content": text}]
        turns.append(made)
    return turns


_DEFAULTS: dict[Any, Any] = {str: QUESTION, int: 1, float: 1.0, bool: False}


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"there is no file {str(path)!r:.200} (looked in {os.getcwd()})")
    # Like ``python path``: what stands beside it can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{str(path)!r:.200} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _from_name(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"there is no module {name!r:.200} (looked in {os.getcwd()} and on the path)") from error
        raise
