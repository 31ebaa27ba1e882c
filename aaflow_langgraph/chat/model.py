"""``KVChatModel``: the chat model of a broker, for every place where LangChain and LangGraph take one.

The sync generator is the truth; the async methods run it in one thread and keep the event loop free.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput, ModelProfile
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import Field, PrivateAttr

from aaflow_langgraph.broker import KVBroker
from aaflow_langgraph.chat.answer import Answer
from aaflow_langgraph.chat.request import SAMPLING, Request, Requests, schemas, stop_strings
from aaflow_langgraph.chat.tools import Said, check_choice
from aaflow_langgraph.engine.line import check_priority
from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.journal import origin
from aaflow_langgraph.results import Generation
from aaflow_langgraph.threads import in_thread

# What callers of hosted models pass by habit; there is no server to reach here.
_NO_SERVER = frozenset({"api_key", "base_url", "timeout", "max_retries", "streaming", "stream_usage"})


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
        priority: Requests with a smaller number go first; equal ones in the order they came.

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
    priority: int = 0

    _requests: Requests = PrivateAttr()

    def __init__(self, broker: KVBroker, **fields: Any) -> None:
        if not isinstance(broker, KVBroker):
            raise ConfigError(f"the first argument must be a KVBroker, got {type(broker).__name__}")
        unknown = sorted(set(fields) - set(type(self).model_fields) - _NO_SERVER)
        if unknown:
            raise ConfigError(
                f"unknown field {unknown[0]!r}; a KVChatModel has {', '.join(SAMPLING)}, stop, deterministic, kv and priority"
            )
        fields["stop"] = stop_strings(fields.get("stop"))
        Sampling(**{name: fields[name] for name in (*SAMPLING, "stop") if name in fields})
        for name, allowed in (("deterministic", (True, False)), ("kv", (True, False, None))):
            value = fields.get(name, allowed[-1])
            if not any(value is one for one in allowed):
                raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r:.80}")
        check_priority(fields.get("priority", 0))
        kept: dict[str, Any] = {name: value for name, value in fields.items() if name not in _NO_SERVER}
        kept["broker"] = broker
        super().__init__(**kept)
        self._requests = Requests(broker)

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
            **{name: getattr(self, name) for name in SAMPLING},
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
        shared[id(self._requests)] = self._requests
        return super().__deepcopy__(shared)

    def get_token_ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens by their text."""
        return list(self.broker.engine.frame.encode(text))

    def get_num_tokens_from_messages(self, messages: list[BaseMessage], tools: Sequence[Any] | None = None) -> int:
        """Tokens of the prompt that these messages make, the template's frame included."""
        return len(self._requests.prompt(messages, None if tools is None else schemas(tools)).token_ids)

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
        self._requests.renderer.template.tool_format()  # refuses a model without
        shown = schemas(tools)
        check_choice(tool_choice, shown)
        bound: dict[str, Any] = {"tools": shown, **kwargs}
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

        cancel = threading.Event()
        result: ChatResult = await in_thread(partial(body, cancel), cancel)
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

        cancel = threading.Event()
        speaking = asyncio.ensure_future(in_thread(partial(body, cancel), cancel))
        try:
            while (event := await arrived.get()) is not None:
                yield _chunk(event)
            await speaking
        finally:
            # Closed early, or cancelled: nothing of this request runs on once its caller has gone.
            speaking.cancel()
            await asyncio.wait({speaking})

    def _request(self, messages: list[BaseMessage], stop: list[str] | None, options: dict[str, Any]) -> Request:
        fields = {name: getattr(self, name) for name in (*SAMPLING, "stop", "deterministic", "kv", "priority")}
        return self._requests.make(messages, stop, options, fields)

    def _drained(self, request: Request, cancel: threading.Event) -> ChatResult:
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

    def _speak(self, request: Request, cancel: threading.Event) -> Generator[str | Answer, None, None]:
        """Content as it comes, then the answer."""
        prompt = request.prompt
        stream = self.broker.stream_complete(
            prompt.token_ids,
            near=request.near,
            turns=prompt.turns,
            end_of_turn=prompt.end_of_turn,
            sampling=request.sampling,
            deterministic=request.deterministic,
            priority=request.priority,
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
        # Not from the recipe's turns: the same tokens may have been asked for in another way before.
        whole = self.broker.token_ids(event.handle)
        answer_ids = whole[len(prompt.token_ids) : len(whole) - len(prompt.end_of_turn)]
        said, words, rest = reader.finish(answer_ids)
        if rest:
            yield rest
        if not request.parallel:
            said = Said(said.content, said.calls[:1], said.broken if not said.calls else ())
        is_more = bool(said.calls or said.broken)
        yield Answer(event, said, words if is_more else "", self.model_name, request.path)


def _chunk(event: str | Answer) -> ChatGenerationChunk:
    message = AIMessageChunk(content=event) if isinstance(event, str) else event.last_chunk()
    return ChatGenerationChunk(message=message)
