"""LangChain's own standard suites for chat models: the unit class whole, on a model with tools; the integration class on the
real demo model, with what that can do.

SmolLM2-135M-Instruct has no tools in its chat template, so the tests that call tools or ask for structured output are skipped
by the suite's own properties; they run on a tiny model whose words are scripted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from aaflow_langgraph import KVBroker, KVChatModel
from aaflow_langgraph.assets import demo_model
from aaflow_langgraph.engine.transformers import TransformersEngine
from tests import templates, tiny
from tests.scripted import ScriptedBroker, scripted  # noqa: F401


class TestUnit(ChatModelUnitTests):
    """Every test of the unit class."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def broker(cls) -> Iterator[None]:
        engine = TransformersEngine(tiny.model(), tiny.tokenizer(templates.HERMES), name="tiny-tools")
        with KVBroker.open(engine, pool_bytes=4 << 20) as opened:
            cls.opened = opened
            yield
        del cls.opened

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return KVChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"broker": self.opened}

    def test_it_claims_what_the_suite_then_tests(self) -> None:
        assert self.has_tool_calling
        assert self.has_tool_choice
        assert self.has_structured_output


@pytest.mark.slow
class TestIntegration(ChatModelIntegrationTests):
    """The integration class on the real model."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def broker(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", os.environ["AAFLOW_REAL_CACHE"])
            with KVBroker.open(demo_model(progress=False), pool_bytes=128 << 20) as opened:
                cls.opened = opened
                yield
                assert opened.stats().num_leases == 0
        del cls.opened

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return KVChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"broker": self.opened, "max_tokens": 6}

    @property
    def has_tool_calling(self) -> bool:
        """Its template has no tools."""
        return False

    @property
    def has_structured_output(self) -> bool:
        """Structured output is a tool call."""
        return False

    @property
    def supported_usage_metadata_details(self) -> Any:
        return {"invoke": ["cache_read_input", "cache_creation_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> Any:
        return self._again(stream)

    def invoke_with_cache_creation_input(self, *, stream: bool = False) -> Any:
        return self._again(stream)

    def _again(self, stream: bool) -> Any:
        model = self.chat_model_class(**self.chat_model_params)
        model.invoke("Say it twice.")
        if not stream:
            return model.invoke("Say it twice.")
        chunks = list(model.stream("Say it twice."))
        whole = chunks[0]
        for chunk in chunks[1:]:
            whole = whole + chunk
        return whole


def call_a_tool(prompt: str) -> str:
    """Calls the tool that was chosen, else the first one, once per question, with arguments of the right types."""
    listed = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    question = prompt.rsplit("<|im_start|>user\n", 1)[1]
    begun = re.search(r'<tool_call>\n\{"name":(?: "(?P<name>[^"]+)", "arguments":)?$', prompt)
    if listed is None or ("<tool_response>" in question and not begun):
        return "Hello."
    tools = {tool["function"]["name"]: tool["function"] for tool in map(json.loads, listed[1].split("\n"))}
    name = (begun and begun["name"]) or next(iter(tools))
    quoted = re.search(r"'([^']+)'", question)
    word = quoted[1] if quoted else "word"
    properties = tools[name]["parameters"].get("properties", {})
    args = {key: 3 if schema.get("type") == "integer" else word for key, schema in properties.items()}
    named = f' "{name}", "arguments":' if not (begun and begun["name"]) else ""
    opening = "" if begun else '<tool_call>\n{"name":'
    return f"{opening}{named} {json.dumps(args, ensure_ascii=False)}}}\n</tool_call>"


@pytest.mark.usefixtures("scripted")
class TestTools(ChatModelIntegrationTests):
    """The integration class again, for its tool tests, on a tiny model whose words are scripted."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def broker(cls) -> Iterator[None]:
        engine = TransformersEngine(tiny.model(), tiny.tokenizer(templates.HERMES), name="tiny-tools")
        with ScriptedBroker.open(engine, pool_bytes=64 << 20) as opened:
            assert isinstance(opened, ScriptedBroker)
            opened.script = call_a_tool
            cls.opened = opened
            yield
            assert opened.check() == []
        del cls.opened

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return KVChatModel

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"broker": self.opened}
