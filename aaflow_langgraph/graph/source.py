"""Where a prefill node gets its text: a function of the state, a LangChain runnable, or a prompt with placeholders.

Knows how LangGraph calls a node function; knows no broker. Nothing here catches what the user's code raises:
``GraphInterrupt`` is an ``Exception``.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.runnables import Runnable, RunnableConfig
from langgraph.config import get_store, get_stream_writer
from langgraph.runtime import get_runtime

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.prompt import Prompt, state_values

TextSourceLike = (
    str | Callable[..., str | bytes] | Callable[..., Awaitable[str | bytes]] | Runnable[Any, str] | Runnable[Any, bytes]
)

# What LangGraph gives a node function that asks for it by name, by way of its public accessors.
_INJECTED: dict[str, Callable[[RunnableConfig], Any]] = {
    "config": lambda config: config,
    "runtime": lambda config: get_runtime(),
    "store": lambda config: get_store(),
    "writer": lambda config: get_stream_writer(),
}


def text_source(source: TextSourceLike) -> TextSource:
    """``source`` as a ``TextSource``.

    Raises:
        ConfigError: It is none of the three, or a prompt whose placeholders are no plain state keys. Way out: fail.
    """
    if isinstance(source, str):
        return _PromptText(Prompt.parse(source, what="the text"))
    if isinstance(source, Runnable):
        return _RunnableText(source)
    if callable(source):
        return _FunctionText(source)
    raise ConfigError(f"a text source is a function, a runnable or a prompt, got {type(source).__name__}")


class TextSource(ABC):
    """Gives the text for a state.

    Attributes:
        name: Names the source in messages.
        is_async: In an async graph the text is awaited on the loop, by ``aread``; otherwise ``read`` runs in a thread.
    """

    name: str
    is_async: bool = False

    @abstractmethod
    def read(self, state: Any, config: RunnableConfig) -> Any:
        """What the source returns for ``state``, unchecked."""

    async def aread(self, state: Any, config: RunnableConfig) -> Any:
        """Async ``read``; only where ``is_async``."""
        return self.read(state, config)


class _PromptText(TextSource):
    name = "the prompt"

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt

    def read(self, state: Any, config: RunnableConfig) -> Any:
        return self._prompt.render(state_values(state))


class _RunnableText(TextSource):
    is_async = True

    def __init__(self, runnable: Runnable[Any, Any]) -> None:
        self.name = runnable.get_name()
        self._runnable = runnable

    def read(self, state: Any, config: RunnableConfig) -> Any:
        return self._runnable.invoke(state, config)

    async def aread(self, state: Any, config: RunnableConfig) -> Any:
        return await self._runnable.ainvoke(state, config)


class _FunctionText(TextSource):
    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        body = getattr(function, "__call__", None)  # noqa: B004 - of an object it is the method to ask about
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(body)
        self._function = function
        try:
            parameters = list(inspect.signature(function).parameters.values())[1:]
        except ValueError:  # some builtins have no signature
            parameters = []
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self._injected = [p.name for p in parameters if p.name in _INJECTED and p.kind in by_name]

    def read(self, state: Any, config: RunnableConfig) -> Any:
        if self.is_async:
            raise ConfigError(
                f"{self.name} is async: run the graph with ainvoke or astream, or give prefill_node a sync function"
            )
        return self._called(state, config)

    async def aread(self, state: Any, config: RunnableConfig) -> Any:
        return await self._called(state, config)

    def _called(self, state: Any, config: RunnableConfig) -> Any:
        return self._function(state, **{name: _INJECTED[name](config) for name in self._injected})
