"""An answer of the model as LangChain messages: content, tool calls, usage, and which handle names it.

Knows message classes, tool formats and results; knows no broker and no prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall, ToolCallChunk
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from transformers import PreTrainedTokenizerBase

from aaflow_langgraph.chat.spoken import Spoken
from aaflow_langgraph.chat.tools import Said, ToolFormat
from aaflow_langgraph.engine.turns import ChatFrame
from aaflow_langgraph.errors import MalformedHandle
from aaflow_langgraph.generation import TextStream
from aaflow_langgraph.graph.stream import usage_dict, usage_metadata
from aaflow_langgraph.handle import KVHandle
from aaflow_langgraph.hashing import digest
from aaflow_langgraph.results import Generation

_CUT = "\ufffd"
"""What is left of a character that ``max_tokens`` cut in two. It is no content, like special tokens."""


def handle_of(message: BaseMessage) -> KVHandle | None:
    """The handle of the conversation that ended in ``message``; None when no ``KVChatModel`` said it."""
    kv = message.response_metadata.get("kv")
    if not isinstance(kv, Mapping):
        return None
    try:
        return KVHandle(kv_id=kv["kv_id"], kv_namespace=kv["kv_namespace"], kv_tokens=kv["kv_tokens"])
    except (KeyError, MalformedHandle):  # edited by hand: the message then stands by its text
        return None


def words_of(message: AIMessage, tools: ToolFormat | None, spoken: Spoken | None, frame: ChatFrame) -> str | None:
    """All that the model said in a message where that is more than its content, if the message still says the same; None
    when it is no more, when somebody edited the message, or when nobody knows.
    """
    kv = message.response_metadata.get("kv")
    words = kv.get("words") if isinstance(kv, Mapping) else None
    if tools is not None and isinstance(words, str):
        return words if _says(tools.read(words.rstrip(_CUT)), message) else None
    if spoken is None or message.tool_calls or message.invalid_tool_calls:
        return None
    whole = frame.spell(spoken.answer_ids)
    is_more = whole != message.text and frame.decode(spoken.answer_ids).rstrip(_CUT) == message.text
    return whole if is_more else None


def _says(said: Said, message: AIMessage) -> bool:
    """Does a message hold what was said, or its first call?"""
    calls = [(call.name, call.args) for call in said.calls]
    broken = [(call.name, call.text) for call in said.broken]
    kept = [(call["name"], call["args"]) for call in message.tool_calls]
    kept_broken = [(call["name"] or "", call["args"] or "") for call in message.invalid_tool_calls]
    is_same = kept == calls[: len(kept)] and kept_broken == broken[: len(kept_broken)]
    return said.content == message.text and is_same and bool(kept or kept_broken)


class Reader:
    """Takes the tokens of an answer as they come, says what of it may be shown, and at the end what was called.

    Args:
        tokenizer: The model's.
        tools: How it writes tool calls.
        stop: Stop strings of the request.
        opening: Text with which the answer began already.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: ToolFormat, stop: Sequence[str], opening: str
    ) -> None:
        special = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= set(tokenizer.all_special_ids)
        self._hidden = special - {tokenizer.convert_tokens_to_ids(token) for token in tools.tokens}
        self._tokenizer = tokenizer
        self._tools = tools
        self._opening = opening
        self._stream = TextStream(self._decode, stop)
        self._num_shown = 0

    def push(self, token_id: int) -> str:
        """Add a token; the content that can be shown now."""
        self._stream.push(token_id)
        text = self._opening + self._stream.text
        return self._show(text[: self._tools.num_shown(text)])

    def finish(self, token_ids: Sequence[int]) -> tuple[Said, str, str]:
        """Content and calls of the whole answer, all its words, and the content that was not shown yet."""
        words = self._opening + self._decode(token_ids)
        said = self._tools.read(words.rstrip(_CUT))
        return said, words, self._show(said.content)

    def _show(self, content: str) -> str:
        fresh = content[self._num_shown :]
        self._num_shown += len(fresh)
        return fresh

    def _decode(self, token_ids: Sequence[int]) -> str:
        kept = [token_id for token_id in token_ids if token_id not in self._hidden]
        return str(self._tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer.

    Attributes:
        generation: What the broker returned.
        said: Its content and calls.
        words: All of its text where that is more than the content, else empty.
        model: Name of the model.
        path: Where in a graph's run it was said, so that siblings that say the same have calls of their own.
    """

    generation: Generation
    said: Said
    words: str
    model: str
    path: str

    @property
    def finish_reason(self) -> str:
        """``"stop"``, ``"length"`` or ``"tool_calls"``."""
        is_call = self.generation.finish_reason == "stop" and self.said.calls
        return "tool_calls" if is_call else self.generation.finish_reason

    def message(self) -> AIMessage:
        """The answer as one message."""
        return AIMessage(
            content=self.said.content,
            tool_calls=self._calls(),
            invalid_tool_calls=self._broken(),
            usage_metadata=usage_metadata(self.generation.usage),
            response_metadata=self._metadata(),
        )

    def last_chunk(self) -> AIMessageChunk:
        """What ends the stream of an answer: calls, usage and all metadata, once, because strings of several chunks would be
        joined.
        """
        return AIMessageChunk(
            content="",
            tool_call_chunks=self._chunks(),
            usage_metadata=usage_metadata(self.generation.usage),
            response_metadata=self._metadata(),
            chunk_position="last",
        )

    def _metadata(self) -> dict[str, Any]:
        handle = self.generation.handle
        kv: dict[str, Any] = {
            "kv_id": handle.kv_id,
            "kv_namespace": handle.kv_namespace,
            "kv_tokens": handle.kv_tokens,
            **usage_dict(self.generation.usage),
        }
        if self.words:
            kv["words"] = self.words
        return {"model_name": self.model, "finish_reason": self.finish_reason, "kv": kv}

    def _id(self, number: int) -> str:
        # Nine letters and digits, because Mistral's templates take no other. Equal runs have equal ids.
        return digest("tool-call", self.generation.handle.kv_id, self.path, str(number))[:9]

    def _calls(self) -> list[ToolCall]:
        return [
            tool_call(name=call.name, args=call.args, id=self._id(number))
            for number, call in enumerate(self.said.calls)
        ]

    def _broken(self) -> list[InvalidToolCall]:
        first = len(self.said.calls)
        return [
            invalid_tool_call(name=call.name or None, args=call.text, id=self._id(number), error=call.error)
            for number, call in enumerate(self.said.broken, start=first)
        ]

    def _chunks(self) -> list[ToolCallChunk]:
        calls = [(call["name"], json.dumps(call["args"], ensure_ascii=False), call["id"]) for call in self._calls()]
        broken = [(call["name"], call["args"], call["id"]) for call in self._broken()]
        return [
            tool_call_chunk(name=name, args=args, id=id_, index=index)
            for index, (name, args, id_) in enumerate([*calls, *broken])
        ]
