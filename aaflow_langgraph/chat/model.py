"""``KVChatModel``: the chat model of a broker, for every place where LangChain and LangGraph take one.

The sync generator is the truth; the async methods run it in one thread and keep the event loop free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.config import ensure_config
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.chat.answer import Answer, Reader, handle_of, words_of
from aaflow_langgraph.chat.lineage import Lineage
from aaflow_langgraph.chat.messages import template_message
from aaflow_langgraph.chat.render import Part, Prompt, Renderer, Spoken
from aaflow_langgraph.chat.tools import Said, ToolFormat, check_choice
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.errors import ConfigError, IncompatibleHandle
from aaflow_langgraph.graph.stream import task_path
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.journal import origin
from aaflow_langgraph.results import Generation

_SAMPLING = ("temperature", "max_tokens", "top_p", "top_k", "seed")
_CALL = frozenset({*_SAMPLING, "deterministic", "kv", "kv_id", "tools", "tool_choice", "parallel_tool_calls", "stream"})
# What callers of hosted models pass by habit; there is no server to reach here.
_NO_SERVER = frozenset({"api_key", "base_url", "timeout", "max_retries", "streaming", "stream_usage"})
_NEAR = 8
"""So many of the newest answers are looked up: an older one is part of them, or of another branch."""


class KVChatModel(BaseChatModel):
    """A chat model whose every call reuses the longest known token prefix: across nodes, agents, threads and processes.

    An answer carries the id of its conversation in ``response_metadata["kv"]``; the next turn goes on from those very token ids
    instead of encoding the text again, and parallel branches fork.

    Args:
        broker: Computes and keeps the KV.
        temperature: 0 is greedy.
        max_tokens: Most new tokens of an answer.
        top_p, top_k, seed, stop: As in ``Sampling``. Without a seed, one is derived from the prompt, the settings and the place
            in the graph's run.
        deterministic: Run alone on canonical KV only: bits do not depend on what was cached.
        kv: False prefills every prompt whole and publishes nothing, for comparison; None and True leave it to the broker.

    A call takes the same settings as keyword arguments, and ``kv=handle`` or ``kv_id=...`` to name a conversation that the
    prompt is likely to begin with.

    Raises:
        ConfigError: A field is unknown or out of range. When called: see the reference. Way out: fail.

    Examples:
        >>> model = KVChatModel(KVBroker.open("Qwen/Qwen2.5-0.5B-Instruct"), max_tokens=64)  # doctest: +SKIP
        >>> model.invoke("Which city is the capital of Kenya?").text  # doctest: +SKIP
        'The capital of Kenya is Nairobi.'
    """

    broker: Any = Field(exclude=True, repr=False)
    temperature: float = 0.0
    max_tokens: int = 256
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    deterministic: bool = False
    kv: bool | None = None

    _renderer: Renderer = PrivateAttr()

    def __init__(self, broker: KVBroker, **fields: Any) -> None:
        if not isinstance(broker, KVBroker):
            raise ConfigError(f"the first argument must be a KVBroker, got {type(broker).__name__}")
        unknown = sorted(set(fields) - set(type(self).model_fields) - _NO_SERVER)
        if unknown:
            raise ConfigError(
                f"unknown field {unknown[0]!r}; a KVChatModel has {', '.join(_SAMPLING)}, stop, deterministic and kv"
            )
        fields["stop"] = _stops(fields.get("stop"))
        _sampling({name: fields[name] for name in _SAMPLING if name in fields}, fields["stop"])
        for name, allowed in (("deterministic", (True, False)), ("kv", (True, False, None))):
            value = fields.get(name, allowed[-1])
            if not any(value is one for one in allowed):
                raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r:.80}")
        kept: dict[str, Any] = {name: value for name, value in fields.items() if name not in _NO_SERVER}
        kept["broker"] = broker
        super().__init__(**kept)
        self._renderer = Renderer(broker.engine.tokenizer, broker.engine.frame)

    # ---------------------------------------------------------------- what LangChain asks about a model

    @property
    def model_name(self) -> str:
        """Name of the model that the broker serves."""
        return str(self.broker.namespace.model)

    @property
    def _llm_type(self) -> str:
        return "aaflow"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "kv_namespace": self.broker.namespace.digest,
            **{name: getattr(self, name) for name in _SAMPLING},
            "stop": list(self.stop),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop or list(self.stop) or None, **kwargs)
        params["ls_provider"] = "aaflow"
        return params

    def _resolve_model_profile(self) -> ModelProfile | None:
        return ModelProfile(
            max_input_tokens=self.broker.engine.window,
            text_inputs=True,
            image_inputs=False,
            audio_inputs=False,
            video_inputs=False,
            text_outputs=True,
            structured_output=False,
        )

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse: a broker holds a model and memory of this process."""
        raise ConfigError(
            "a KVChatModel cannot be pickled: its broker holds a model and KV of this process. Make it where it runs"
        )

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> KVChatModel:
        """A copy that speaks through the same broker."""
        shared = {} if memo is None else memo
        shared[id(self.broker)] = self.broker
        shared[id(self._renderer)] = self._renderer
        return super().__deepcopy__(shared)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens by their text."""
        return list(self.broker.engine.frame.encode(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, the template's frame included."""
        shown = None if tools is None else _schemas(tools)
        return len(self._prompt(messages, shown, None, "", ()).token_ids)

    # ---------------------------------------------------------------- tools

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        parallel_tool_calls: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """This model with tools, shown to it by its own chat template.

        Args:
            tools: Functions, LangChain tools, pydantic or typed-dict classes, or schemas.
            tool_choice: ``"auto"``, ``"none"``, ``"any"`` or the name of a tool. A choice begins the answer with the call: what
                follows is still the model's.
            parallel_tool_calls: False keeps the first call of an answer.

        Raises:
            ConfigError: The model's template knows no tools or writes calls in an unknown way, a tool has no schema, or the
                choice names no tool. Way out: fail.
        """
        self._renderer.tool_format()  # refuses a model without
        schemas = _schemas(tools)
        check_choice(tool_choice, schemas)
        bound: dict[str, Any] = {"tools": schemas, **kwargs}
        if tool_choice is not None:
            bound["tool_choice"] = tool_choice
        if parallel_tool_calls is not None:
            bound["parallel_tool_calls"] = parallel_tool_calls
        return self.bind(**bound)

    # ---------------------------------------------------------------- calls

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return self._drained(self._request(messages, stop, kwargs), threading.Event())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        def body(cancel: threading.Event) -> ChatResult:
            return self._drained(self._request(messages, stop, kwargs), cancel)

        result: ChatResult = await _in_thread(body)
        return result

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        with closing(self._speak(self._request(messages, stop, kwargs), threading.Event())) as events:
            for event in events:
                yield _chunk(event)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[str | Answer | None] = asyncio.Queue()

        def body(cancel: threading.Event) -> None:
            try:
                with closing(self._speak(self._request(messages, stop, kwargs), cancel)) as events:
                    for event in events:
                        loop.call_soon_threadsafe(arrived.put_nowait, event)
            finally:
                loop.call_soon_threadsafe(arrived.put_nowait, None)

        speaking = asyncio.ensure_future(_in_thread(body))
        try:
            while (event := await arrived.get()) is not None:
                yield _chunk(event)
            await speaking
        finally:
            # Closed early, or cancelled: nothing of this request runs on once its caller has gone.
            speaking.cancel()
            await asyncio.wait({speaking})

    def _drained(self, request: _Request, cancel: threading.Event) -> ChatResult:
        with closing(self._speak(request, cancel)) as events:
            for event in events:
                if isinstance(event, Answer):
                    message = event.message()
                    info = {"finish_reason": event.finish_reason}
                    return ChatResult(
                        generations=[ChatGeneration(message=message, generation_info=info)],
                        llm_output={"model_name": self.model_name},
                    )
        raise RuntimeError("a stream ended without its generation")

    def _speak(self, request: _Request, cancel: threading.Event) -> Generator[str | Answer, None, None]:
        """Content as it comes, then the answer."""
        prompt = request.prompt
        stream = self.broker.stream_complete(
            prompt.token_ids,
            near=request.near,
            turns=prompt.turns,
            end_of_turn=prompt.end_of_turn,
            sampling=request.sampling,
            deterministic=request.deterministic,
            seed_path=request.path,
            kv=request.kv,
            cancel=cancel,
        )
        reader = request.reader(self.broker.engine.tokenizer)
        with closing(stream):
            # Asked in the name of the node; the name is read as the request begins.
            with origin(node=request.node, thread=request.thread):
                event = next(stream)
            while not isinstance(event, Generation):
                text = event.text
                if reader is not None:
                    text = "" if event.token_id is None else reader.push(event.token_id)
                if text:
                    yield text
                event = next(stream)
        request.lineage.leave(event.handle)
        if reader is None:
            yield Answer(event, Said(event.text), "", self.model_name, request.path)
            return
        spoken = Spoken.of(self.broker.recipe(event.handle), self.broker.token_ids(event.handle))
        said, words, rest = reader.finish(spoken.answer_ids)
        if rest:
            yield rest
        if not request.parallel:
            said = Said(said.content, said.calls[:1], said.broken if not said.calls else ())
        is_more = bool(said.calls or said.broken)
        yield Answer(event, said, words if is_more else "", self.model_name, request.path)

    # ---------------------------------------------------------------- requests

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, options: Mapping[str, Any]) -> _Request:
        """Everything that a call is about, checked before anything is computed."""
        unknown = sorted(set(options) - _CALL)
        if unknown == ["model"] and options["model"] == self.model_name:
            unknown = []
        if unknown:
            raise ConfigError(
                f"a call of a KVChatModel takes {', '.join(sorted(_CALL - {'stream'}))} and stop, not {unknown[0]!r}"
            )
        stops = self.stop if stop is None else _stops(stop)
        sampling = _sampling({name: options.get(name, getattr(self, name)) for name in _SAMPLING}, stops)
        tools = _schemas(options["tools"]) if options.get("tools") else None
        choice = check_choice(options.get("tool_choice"), tools or [])
        if choice is False:
            tools = None
        parallel = options.get("parallel_tool_calls")
        if parallel not in (None, True, False):
            raise ConfigError(f"parallel_tool_calls must be True or False, got {parallel!r:.80}")
        used, hint = self._hint(options)
        tool_format = None if tools is None else self._renderer.tool_format()
        opening = ""
        if tool_format is not None and choice is not None:
            opening = tool_format.opening(choice if isinstance(choice, str) else None)
        config = ensure_config()
        namespace = self.broker.namespace.digest
        lineage = Lineage.of(config, namespace)
        prompt = self._prompt(messages, tools, tool_format, opening, (*hint, *lineage.own))
        node = (config.get("metadata") or {}).get("langgraph_node", "")
        return _Request(
            prompt=prompt,
            near=(*hint, *lineage.own, *_answered(messages, namespace), *lineage.others)[:_NEAR],
            sampling=sampling,
            tools=tool_format,
            opening=opening,
            parallel=parallel is not False,
            deterministic=options.get("deterministic", self.deterministic),
            kv=used,
            path=task_path(config),
            node=str(node),
            thread=str((config.get("configurable") or {}).get("thread_id", "")),
            lineage=lineage,
        )

    def _hint(self, options: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
        """Whether KV is used, and the id of a conversation that the prompt is likely to begin with."""
        kv, kv_id = options.get("kv", self.kv), options.get("kv_id")
        if kv is None or isinstance(kv, bool):
            used = kv is not False
        else:
            used = self.kv is not False
            handle = KVHandle.coerce(kv)
            if handle.kv_namespace != self.broker.namespace.digest:
                raise IncompatibleHandle(
                    f"the handle in kv= belongs to namespace {handle.kv_namespace[:12]}, this model's broker serves "
                    f"{self.broker.namespace.digest[:12]}; make it with this broker"
                )
            kv_id = handle.kv_id
        if kv_id is None:
            return used, ()
        self.broker.find_recipe(kv_id)  # refuses what is no id
        return used, (kv_id,)

    def _prompt(
        self,
        messages: Sequence[BaseMessage],
        tools: list[dict[str, Any]] | None,
        tool_format: ToolFormat | None,
        opening: str,
        hint: tuple[str, ...],
    ) -> Prompt:
        known = {kv_id: self._recall(kv_id) for kv_id in _answered(messages, self.broker.namespace.digest)[:_NEAR]}
        parts = []
        for message in messages:
            spoken = words = None
            if isinstance(message, AIMessage):
                handle = handle_of(message)
                spoken = known.get(handle.kv_id) if handle else None
                words = words_of(message, tool_format, spoken, self.broker.engine.frame)
            parts.append(Part(template_message(message), spoken, words))
        hints = [spoken for kv_id in hint if (spoken := self._recall(kv_id)) is not None]
        return self._renderer.render(parts, tools=tools, opening=opening, hints=hints)

    def _recall(self, kv_id: str) -> Spoken | None:
        recipe = self.broker.find_recipe(kv_id)
        return None if recipe is None else Spoken.of(recipe, self.broker.tokens_of(kv_id))


@dataclass(frozen=True, slots=True)
class _Request:
    prompt: Prompt
    near: tuple[str, ...]
    sampling: Sampling
    tools: ToolFormat | None
    opening: str
    parallel: bool
    deterministic: bool
    kv: bool
    path: str
    node: str
    thread: str
    lineage: Lineage

    def reader(self, tokenizer: Any) -> Reader | None:
        """What takes the answer apart; None when there are no tools to call."""
        return None if self.tools is None else Reader(tokenizer, self.tools, self.sampling.stop, self.opening)


def _answered(messages: Sequence[BaseMessage], namespace: str) -> tuple[str, ...]:
    """Ids of the conversations behind the model's own answers, newest first."""
    handles = [handle_of(message) for message in reversed(messages) if isinstance(message, AIMessage)]
    return tuple(dict.fromkeys(one.kv_id for one in handles if one is not None and one.kv_namespace == namespace))


def _chunk(event: str | Answer) -> ChatGenerationChunk:
    message = AIMessageChunk(content=event) if isinstance(event, str) else event.last_chunk()
    return ChatGenerationChunk(message=message)


def _schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools must be a list of tools, got {type(tools).__name__}")
    schemas = []
    for tool in tools:
        try:
            schemas.append(convert_to_openai_tool(tool))
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ConfigError(f"{tool!r:.80} is no tool that a schema can be made of: {error}") from error
    return schemas


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    if isinstance(stop, str) or not isinstance(stop, Sequence):
        raise ConfigError(f"stop must be a list of non-empty strings, got {stop!r:.80}")
    return tuple(stop)


def _sampling(settings: Mapping[str, Any], stop: tuple[str, ...]) -> Sampling:
    return Sampling(**settings, stop=stop)


async def _in_thread(body: Callable[[threading.Event], Any]) -> Any:
    """``body`` in a thread with this context; a cancelled task sets the event and waits until nothing of it runs any more."""
    cancel = threading.Event()
    running = asyncio.get_running_loop().run_in_executor(None, copy_context().run, body, cancel)
    # Looked at even when this task is cancelled a second time while it waits for the body to end.
    running.add_done_callback(lambda done: done.cancelled() or done.exception())
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancel.set()
        await asyncio.wait({running})
        raise
