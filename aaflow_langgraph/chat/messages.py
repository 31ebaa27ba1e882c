"""LangChain messages as the dicts that chat templates read.

Knows message classes and content blocks; knows no tokenizer and no template. What a text model cannot read is refused by
name, never dropped: a question about a picture that nobody sees would be answered anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)

from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.handle import is_unicode

_ROLES: tuple[tuple[type[BaseMessage], str], ...] = (
    (SystemMessage, "system"),
    (HumanMessage, "user"),
    (AIMessage, "assistant"),
    (ToolMessage, "tool"),
    (FunctionMessage, "tool"),
)

# Blocks that stand for something the message carries elsewhere, or that no template keeps of an earlier turn.
_CARRIED = frozenset({"tool_call", "tool_use", "function_call", "invalid_tool_call", "tool_call_chunk"})
_REASONING = frozenset({"reasoning", "thinking", "redacted_thinking", "reasoning_content"})


def template_message(message: BaseMessage) -> dict[str, Any]:
    """One message as the dict that a chat template reads: role, content, name, tool calls and their ids.

    Raises:
        ConfigError: No message, a kind that no template has (``RemoveMessage``), or a content that is no text. Way out: fail.
    """
    if not isinstance(message, BaseMessage):
        raise ConfigError(f"a chat model reads messages, got {type(message).__name__}")
    role = _role(message)
    made: dict[str, Any] = {"role": role, "content": text_of(message.content, f"the {role} message")}
    if message.name:
        made["name"] = _unicode(message.name, "the name of a message")
    if isinstance(message, AIMessage) and message.tool_calls:
        made["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"] or "",
                "function": {"name": call["name"], "arguments": call["args"]},
            }
            for call in message.tool_calls
        ]
    if isinstance(message, ToolMessage):
        made["tool_call_id"] = message.tool_call_id
    return made


def text_of(content: object, what: str) -> str:
    """The text of a content: a string, or a list of strings and text blocks.

    Raises:
        ConfigError: It holds a picture, sound, a file, or something unknown. Way out: fail.
    """
    if isinstance(content, str):
        return _unicode(content, what)
    if not isinstance(content, Sequence):
        raise ConfigError(f"the content of {what} must be text or a list of blocks, got {type(content).__name__}")
    parts = []
    for block in content:
        if isinstance(block, str):
            parts.append(block)
            continue
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif kind not in _CARRIED | _REASONING:
            raise ConfigError(
                f"{what} holds a block of type {kind or type(block).__name__!r}; this model reads text only: describe it in "
                "words, or take it out of the message"
            )
    return _unicode("".join(parts), what)


def _role(message: BaseMessage) -> str:
    if isinstance(message, ChatMessage):
        return _unicode(message.role, "the role of a message")
    for kind, role in _ROLES:
        if isinstance(message, kind):
            return role
    raise ConfigError(
        f"a {type(message).__name__} is no turn of a conversation; apply it to the state first (add_messages does), or leave "
        "it out of what the model reads"
    )


def _unicode(text: str, what: str) -> str:
    if not is_unicode(text):
        raise ConfigError(
            f"{what} is not valid Unicode: it holds a lone surrogate; read the source with errors='replace' or the right codec"
        )
    return text
