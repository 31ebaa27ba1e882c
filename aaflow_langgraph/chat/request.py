"""One call of a chat model, checked and rendered: what is asked, with which settings, in whose name.

Knows messages, options, and a broker's recipes; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables.config import ensure_config
from langchain_core.utils.function_calling import convert_to_openai_tool
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.chat.answer import Reader, handle_of, words_of
from aaflow_langgraph.chat.lineage import Lineage
from aaflow_langgraph.chat.messages import template_message
from aaflow_langgraph.chat.render import Prompt, Renderer
from aaflow_langgraph.chat.spoken import Spoken
from aaflow_langgraph.chat.template import Part
from aaflow_langgraph.chat.tools import ToolFormat, check_choice
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.errors import ConfigError, IncompatibleHandle
from aaflow_langgraph.graph.stream import task_path
from aaflow_langgraph.handle import KVHandle

SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "seed")
"""Settings that a model and a call share with ``Sampling``; ``stop`` comes by a way of its own."""

_OPTIONS = frozenset(
    {*SAMPLING, "deterministic", "kv", "priority", "kv_id", "tools", "tool_choice", "parallel_tool_calls", "stream"}
)
_NEAR = 8
"""So many of the newest answers are looked up: an older one is part of them, or of another branch."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call.

    Attributes:
        prompt: The rendered conversation.
        near: Ids of conversations that it is likely to begin with.
        sampling: How to generate.
        tools: How calls are written; None without tools.
        opening: Text with which the answer begins already; the prompt ends with it.
        parallel: May an answer hold several calls?
        deterministic, priority, kv: As in ``KVBroker.complete``.
        path: Where in a graph's run it is asked.
        node, thread: Who asks.
        lineage: Where the graph's state keeps the handle of who asks.
    """

    prompt: Prompt
    near: tuple[str, ...]
    sampling: Sampling
    tools: ToolFormat | None
    opening: str
    parallel: bool
    deterministic: bool
    priority: int
    kv: bool
    path: str
    node: str
    thread: str
    lineage: Lineage

    def reader(self, tokenizer: PreTrainedTokenizerBase) -> Reader | None:
        """What takes the answer apart; None when there are no tools to call."""
        return None if self.tools is None else Reader(tokenizer, self.tools, self.sampling.stop, self.opening)


class Requests:
    """Makes the requests of one model. Thread-safe.

    Args:
        broker: Where conversations are known.
    """

    def __init__(self, broker: KVBroker) -> None:
        self.renderer = Renderer(broker.engine.tokenizer, broker.engine.frame)
        self._broker = broker
        self._namespace = broker.namespace.digest

    def make(
        self,
        messages: Sequence[BaseMessage],
        stop: Sequence[str] | None,
        options: Mapping[str, Any],
        fields: Mapping[str, Any],
    ) -> Request:
        """Everything that a call is about.

        Args:
            messages: The conversation.
            stop: Stop strings of this call; None leaves the model's.
            options: Keyword arguments of this call.
            fields: The model's own settings.

        Raises:
            ConfigError: An option is unknown or wrong, or the messages cannot be rendered. Way out: fail.
            MalformedHandle, IncompatibleHandle: ``kv=`` is no handle, or one of another model. Way out: fail.
        """
        unknown = set(options) - _OPTIONS
        if options.get("model") == self._broker.namespace.model:
            unknown -= {"model"}
        if unknown:
            taken = ", ".join(sorted(_OPTIONS - {"stream"}))
            raise ConfigError(f"a call of a KVChatModel takes {taken} and stop, not {min(unknown)!r}")
        settings = {name: options.get(name, fields[name]) for name in SAMPLING}
        sampling = Sampling(**settings, stop=fields["stop"] if stop is None else stop_strings(stop))
        tools = schemas(options["tools"]) if options.get("tools") else None
        choice = check_choice(options.get("tool_choice"), tools or [])
        if choice is False:
            tools = None
        parallel = options.get("parallel_tool_calls")
        if parallel not in (None, True, False):
            raise ConfigError(f"parallel_tool_calls must be True or False, got {parallel!r:.80}")
        used, hint = self._hint(options, fields["kv"])
        tool_format = None if tools is None else self.renderer.template.tool_format()
        opening = ""
        if tool_format is not None and choice is not None:
            opening = tool_format.opening(choice if isinstance(choice, str) else None)
        config = ensure_config()
        lineage = Lineage.of(config, self._namespace)
        prompt = self.prompt(messages, tools, tool_format, opening, (*hint, *lineage.own))
        return Request(
            prompt=prompt,
            near=(*hint, *lineage.own, *self._answered(messages), *lineage.others)[:_NEAR],
            sampling=sampling,
            tools=tool_format,
            opening=opening,
            parallel=parallel is not False,
            deterministic=options.get("deterministic", fields["deterministic"]),
            priority=options.get("priority", fields["priority"]),
            kv=used,
            path=task_path(config),
            node=str((config.get("metadata") or {}).get("langgraph_node", "")),
            thread=str((config.get("configurable") or {}).get("thread_id", "")),
            lineage=lineage,
        )

    def prompt(
        self,
        messages: Sequence[BaseMessage],
        tools: list[dict[str, Any]] | None = None,
        tool_format: ToolFormat | None = None,
        opening: str = "",
        hints: Sequence[str] = (),
    ) -> Prompt:
        """The messages as a prompt.

        Raises:
            ConfigError: They cannot be rendered. Way out: fail.
        """
        known = {kv_id: self._recall(kv_id) for kv_id in self._answered(messages)[:_NEAR]}
        parts = []
        for message in messages:
            spoken = words = None
            if isinstance(message, AIMessage):
                handle = handle_of(message)
                spoken = known.get(handle.kv_id) if handle else None
                words = words_of(message, tool_format, spoken, self._broker.engine.frame)
            parts.append(Part(template_message(message), spoken, words))
        hinted = [spoken for kv_id in hints if (spoken := self._recall(kv_id)) is not None]
        return self.renderer.render(parts, tools=tools, opening=opening, hints=hinted)

    def _hint(self, options: Mapping[str, Any], default: bool | None) -> tuple[bool, tuple[str, ...]]:
        """Whether KV is used, and the id of a conversation that the prompt is likely to begin with."""
        kv, kv_id = options.get("kv", default), options.get("kv_id")
        if kv is None or isinstance(kv, bool):
            used = kv is not False
        else:
            used = default is not False
            handle = KVHandle.coerce(kv)
            if handle.kv_namespace != self._namespace:
                raise IncompatibleHandle(
                    f"the handle in kv= belongs to namespace {handle.kv_namespace[:12]}, this model's broker serves "
                    f"{self._namespace[:12]}; make it with this broker"
                )
            kv_id = handle.kv_id
        if kv_id is None:
            return used, ()
        self._broker.find_recipe(kv_id)  # refuses what is no id
        return used, (kv_id,)

    def _answered(self, messages: Sequence[BaseMessage]) -> tuple[str, ...]:
        """Ids of the conversations behind the model's own answers, newest first."""
        handles = [handle_of(message) for message in reversed(messages) if isinstance(message, AIMessage)]
        own = [one.kv_id for one in handles if one is not None and one.kv_namespace == self._namespace]
        return tuple(dict.fromkeys(own))

    def _recall(self, kv_id: str) -> Spoken | None:
        recipe = self._broker.find_recipe(kv_id)
        return None if recipe is None else Spoken.of(recipe, self._broker.tokens_of(kv_id))


def schemas(tools: object) -> list[dict[str, Any]]:
    """Tools as the schemas that templates show.

    Raises:
        ConfigError: It is no list of tools. Way out: fail.
    """
    if isinstance(tools, str | bytes) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of tools, got {type(tools).__name__}")
    made = []
    for tool in tools:
        try:
            made.append(convert_to_openai_tool(tool))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{tool!r:.80} is no tool that a schema can be made of: {error}") from error
    return made


def stop_strings(stop: object) -> tuple[str, ...]:
    """Stop strings as ``Sampling`` takes them.

    Raises:
        ConfigError: It is no list. Way out: fail.
    """
    if stop is None:
        return ()
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise ConfigError(f"stop must be a list of non-empty strings, got {stop!r:.80}")
    return tuple(stop)
