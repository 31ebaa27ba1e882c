"""One model call as LangGraph and its callbacks see it: tokens, usage, errors.

    stream_mode="messages"    AIMessageChunk per token, through the callback manager like any chat model; the last one
                              carries usage_metadata, and response_metadata["kv"] = usage
    stream_mode="custom"      {"type": "aaflow.token", ...} per token, {"type": "aaflow.usage", ...} at the end
    RunnableConfig callbacks  on_chat_model_start, on_llm_new_token, on_llm_end or on_llm_error

Knows langchain-core's callback managers and LangGraph's stream writer; knows no broker. Runs in the thread that generates:
in an async graph the handlers still run on the graph's own event loop, where their futures and queues belong.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ChatMessage, HumanMessage, SystemMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, LLMResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import get_async_callback_manager_for_config, get_callback_manager_for_config
from langgraph.runtime import get_runtime
from langgraph.types import StreamWriter

from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.results import Generation, TokenDelta, Usage


class ModelCall:
    """One generation, reported from its start to its end or error."""

    def __init__(
        self,
        config: RunnableConfig,
        loop: asyncio.AbstractEventLoop | None,
        *,
        node: str,
        model: str,
        role: str,
        prompt: str,
        sampling: Sampling,
    ) -> None:
        self._loop = loop
        self._node = node
        self._model = model
        self._write = stream_writer()
        manager: Any
        if loop is None:
            manager = get_callback_manager_for_config(config)
        else:
            manager = get_async_callback_manager_for_config(config)
        # The names that LangSmith and the tools around it read.
        manager.add_metadata(
            {
                "ls_provider": "aaflow",
                "ls_model_name": model,
                "ls_model_type": "chat",
                "ls_temperature": sampling.temperature,
                "ls_max_tokens": sampling.max_tokens,
            },
            inherit=False,
        )
        (self._run,) = self._settle(
            manager.on_chat_model_start(
                {
                    "lc": 1,
                    "type": "not_implemented",
                    "id": ["aaflow_langgraph", "broker", "KVBroker"],
                    "name": "KVBroker",
                },
                [[_message(role, prompt)]],
                invocation_params={"model": model, **_parameters(sampling)},
                options={"stop": list(sampling.stop) or None},
                name="KVBroker",
                batch_size=1,
            )
        )
        # Chunks of one message share an id, in langchain-core's own form; it is new at every run of the node.
        self._message_id = f"lc_run--{self._run.run_id}"

    def token(self, delta: TokenDelta) -> None:
        """Stream one token."""
        event: dict[str, Any] = {
            "type": "aaflow.token",
            "node": self._node,
            "token_id": delta.token_id,
            "text": delta.text,
        }
        if delta.logprob is not None:
            event["logprob"] = delta.logprob
        self._write(event)
        self._chunk(AIMessageChunk(content=delta.text, id=self._message_id))

    def end(self, generation: Generation) -> None:
        """Stream the last chunk and the usage, and close the run."""
        kv = usage_dict(generation.usage)
        usage = usage_metadata(generation.usage)
        metadata: dict[str, Any] = {
            "model_name": self._model,
            "finish_reason": generation.finish_reason,
            "kv": {"kv_id": generation.handle.kv_id, **kv},
        }
        if generation.logprobs is not None:
            metadata["logprobs"] = list(generation.logprobs)
        # All metadata is in this one chunk: strings of several chunks would be joined when they are merged.
        self._chunk(
            AIMessageChunk(
                content="",
                id=self._message_id,
                usage_metadata=usage,
                response_metadata=metadata,
                chunk_position="last",
            )
        )
        message = AIMessage(
            content=generation.text, id=self._message_id, usage_metadata=usage, response_metadata=metadata
        )
        result = LLMResult(
            generations=[
                [ChatGeneration(message=message, generation_info={"finish_reason": generation.finish_reason})]
            ],
            llm_output={"model_name": self._model, "token_usage": dict(usage), "kv": metadata["kv"]},
        )
        self._settle(self._run.on_llm_end(result))
        report_usage(self._node, generation.handle, kv, write=self._write)

    def error(self, error: BaseException) -> None:
        """Close the run with an error."""
        self._settle(self._run.on_llm_error(error, response=LLMResult(generations=[])))

    def _chunk(self, message: AIMessageChunk) -> None:
        if self._run.handlers:
            self._settle(self._run.on_llm_new_token(str(message.content), chunk=ChatGenerationChunk(message=message)))

    def _settle(self, outcome: Any) -> Any:
        """The outcome of a callback: as it is, or awaited on the graph's loop while this thread waits."""
        return outcome if self._loop is None else asyncio.run_coroutine_threadsafe(outcome, self._loop).result()


def report_usage(node: str, handle: KVHandle, usage: Mapping[str, Any], *, write: StreamWriter | None = None) -> None:
    """Send the usage of a node to whoever listens to ``stream_mode="custom"``."""
    (write or stream_writer())({"type": "aaflow.usage", "node": node, "kv_id": handle.kv_id, **usage})


def usage_dict(usage: Usage) -> dict[str, Any]:
    """Usage as plain JSON, times in milliseconds."""
    return {
        "num_context": usage.num_context,
        "num_reused": usage.num_reused,
        "num_prefilled": usage.num_prefilled,
        "num_decoded": usage.num_decoded,
        "ttft_ms": round(usage.ttft_s * 1000, 3),
        "total_ms": round(usage.total_s * 1000, 3),
        "reuse": usage.reuse,
        "queued_ms": round(usage.queued_s * 1000, 3),
        "longest_itl_ms": round(usage.longest_itl_s * 1000, 3),
        "num_shared": usage.num_shared,
    }


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Usage in langchain-core's own terms: what was reused is ``cache_read``."""
    return UsageMetadata(
        input_tokens=usage.num_context,
        output_tokens=usage.num_decoded,
        total_tokens=usage.num_context + usage.num_decoded,
        input_token_details=InputTokenDetails(cache_read=usage.num_reused, cache_creation=usage.num_prefilled),
    )


def stream_writer() -> StreamWriter:
    """The writer of the running graph's custom stream; one that drops everything outside a graph."""
    try:
        runtime = get_runtime()
    except (RuntimeError, KeyError):
        return _drop
    return _drop if runtime is None else runtime.stream_writer


def task_path(config: RunnableConfig) -> str:
    """Where in the run this task is: equal when an interrupted or failed task runs again, different for siblings.

    The task's own place is its node, its path (a ``Send`` has a number there) and its step, so two runs of the same
    graph on the same input agree, and a loop that comes by again draws anew. A replay from an older checkpoint is a step
    of its own to LangGraph and draws anew as well. Subgraphs around the task are named with LangGraph's task ids, because
    nothing else tells the subgraphs of two ``Send`` apart; those ids follow from the stored checkpoint.
    """
    metadata = config.get("metadata") or {}
    if "langgraph_path" not in metadata:
        return ""
    around = str(metadata.get("langgraph_checkpoint_ns", "")).split("|")[:-1]
    own = [metadata.get("langgraph_node"), metadata["langgraph_path"], metadata.get("langgraph_step")]
    return json.dumps([around, own], default=str)


def _drop(_: Any) -> None:
    return None


def _message(role: str, prompt: str) -> BaseMessage:
    if role == "user":
        return HumanMessage(prompt)
    return SystemMessage(prompt) if role == "system" else ChatMessage(role=role, content=prompt)


def _parameters(sampling: Sampling) -> dict[str, Any]:
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "stop": list(sampling.stop),
    }
