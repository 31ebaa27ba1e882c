"""Apps with one fault each that keeps prompts from being append-only, and apps without any. Tiny random models.

Every app calls ``broker.complete`` or our nodes as users do; each is run for real by ``explain_miss`` tests and dry by lint tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Annotated, Any

import pytest
import torch
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from typing_extensions import TypedDict

from aaflow_langgraph import KVBroker, KVChannel, KVHandle, Sampling, TransformersEngine, generate_node, prefill_node
from aaflow_langgraph.chat.model import KVChatModel
from aaflow_langgraph.explain.report import Cause
from aaflow_langgraph.journal import origin
from tests import templates, tiny
from tests.unit.test_turns import QWEN3

FEW = Sampling(max_tokens=6)
THOUGHT = Sampling(max_tokens=40)  # a thought and a word, spelled in bytes
SYSTEM = "You are a helpful assistant who answers every question in one short sentence."
TOOLS = tuple(
    f'{{"type": "function", "function": {{"name": "{name}", "description": "{name}s", "parameters": {{}}}}}}'
    for name in ("search", "add", "translate")
)
QUESTIONS = (
    {"messages": [{"role": "user", "content": "Which city is the capital of Germany, and why is it?"}]},
    {"messages": [{"role": "user", "content": "And which one is the capital of France?"}]},
)
DOCS = "Berlin is the capital of Germany. Paris is the capital of France. " * 6

_ROLES = {"human": "user", "ai": "assistant", "system": "system"}


@dataclass(frozen=True)
class App:
    """A graph, the brokers behind it, and the inputs of its turns."""

    graph: Any
    brokers: tuple[KVBroker, ...]
    turns: Sequence[Any] = QUESTIONS
    answers: Sequence[str] = ()


Open = Callable[..., KVBroker]
"""``open_one(engine, pool_bytes=...)``."""


@pytest.fixture
def open_one() -> Iterator[Open]:
    """Opens brokers; every one must be clean when the test ends."""
    opened: list[KVBroker] = []

    def open_it(engine: TransformersEngine, pool_bytes: int = 8 << 20) -> KVBroker:
        opened.append(KVBroker.open(engine, pool_bytes=pool_bytes))
        return opened[-1]

    yield open_it
    for broker in opened:
        assert broker.check() == []
        broker.close()


@cache
def engine(template: str = tiny.CHATML, **options: Any) -> TransformersEngine:
    made = {name: options.pop(name) for name in ("tenant", "name") if name in options}
    return TransformersEngine(tiny.model("llama", **options), tiny.tokenizer(template), **{"name": "tiny", **made})


@cache
def thinking() -> TransformersEngine:
    """Answers every prompt with ``<think>a</think>b`` and ends its turn."""
    tokenizer, model = tiny.tokenizer(QWEN3), tiny.model("llama")
    newline, a, b = (tokenizer.encode(c, add_special_tokens=False)[0] for c in "\nab")
    think, close, end = (tokenizer.convert_tokens_to_ids(t) for t in ("<think>", "</think>", "<|im_end|>"))
    embeddings, head = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    embeddings.normal_(0.0, 4.0, generator=torch.Generator().manual_seed(3))
    for last, following in ((newline, think), (think, a), (a, close), (close, b), (b, end)):
        head[following] = embeddings[last] / 8
    return TransformersEngine(model, tokenizer, name="thinking")


def agent(
    broker: KVBroker, system: Callable[[int], str], sampling: Sampling = FEW
) -> Callable[[MessagesState], dict[str, Any]]:
    """A node that renders a system prompt and the messages by hand. Tokens are bytes, so ids of texts are always the same."""

    def node(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        chat = [{"role": "system", "content": system(len(state["messages"]))}]
        chat += [{"role": _ROLES[m.type], "content": m.text} for m in state["messages"]]
        ids = broker.engine.tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return {"messages": [AIMessage(complete(broker, ids, config, sampling))]}

    return node


def complete(broker: KVBroker, ids: Sequence[int], config: RunnableConfig, sampling: Sampling = FEW) -> str:
    """Complete a prompt in the name of the node that runs."""
    with origin(node=config["metadata"]["langgraph_node"], thread=config["configurable"]["thread_id"]):
        return broker.complete(ids, sampling=sampling).text


def one_agent(broker: KVBroker, system: Callable[[int], str], sampling: Sampling = FEW) -> App:
    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent(broker, system, sampling))
    builder.add_edge(START, "agent")
    builder.add_edge("agent", END)
    return App(builder.compile(), (broker,))


# ---------------------------------------------------------------- the eight


def dated(open_one: Open) -> App:
    return one_agent(open_one(engine()), lambda n: f"Now it is {datetime.now().isoformat()} (message {n}). {SYSTEM}")


def tools_in_another_order(open_one: Open) -> App:
    def system(num_messages: int) -> str:
        tools = TOOLS if num_messages == 1 else TOOLS[::-1]
        return f"{SYSTEM}\n# Tools\n<tools>\n" + "\n".join(tools) + "\n</tools>"

    return one_agent(open_one(engine()), system)


def thinks(open_one: Open) -> App:
    return one_agent(open_one(thinking()), lambda _: SYSTEM, THOUGHT)


def encoded_again(open_one: Open) -> App:
    """Token ids are appended where a word is cut in two; another node encodes the whole text."""
    broker = open_one(merging())
    tokenizer = broker.engine.tokenizer
    pieces = ("Which of th", "e cities in the list is the capital of the country?")

    def draft(state: MessagesState) -> dict[str, Any]:  # does not say who asks
        first = broker.materialize(tokenizer.encode(pieces[0], add_special_tokens=False))
        broker.append(first, tokenizer.encode(pieces[1], add_special_tokens=False))
        return {}

    def judge(state: MessagesState, config: RunnableConfig) -> dict[str, Any]:
        ids = tokenizer.encode("".join(pieces) + " Answer:", add_special_tokens=False)
        return {"messages": [AIMessage(complete(broker, ids, config))]}

    builder = StateGraph(MessagesState)
    builder.add_sequence([("draft", draft), ("judge", judge)])
    builder.add_edge(START, "draft")
    return App(builder.compile(), (broker,))


def another_system_prompt(open_one: Open) -> App:
    return one_agent(open_one(engine()), lambda n: f"{'Be kind to all' if n == 1 else 'Be strict'}. {SYSTEM}")


def two_agents(one: KVBroker, other: KVBroker) -> App:
    builder = StateGraph(MessagesState)
    builder.add_sequence([("plan", agent(one, lambda _: SYSTEM)), ("answer", agent(other, lambda _: SYSTEM))])
    builder.add_edge(START, "plan")
    return App(builder.compile(), (one, other))


def another_dtype(open_one: Open) -> App:
    return two_agents(open_one(engine()), open_one(engine(dtype=torch.bfloat16)))


def another_tenant(open_one: Open) -> App:
    return two_agents(open_one(engine(tenant="north")), open_one(engine(tenant="south")))


class Reading(TypedDict):
    question: str
    docs: Annotated[KVHandle, KVChannel]
    more: Annotated[KVHandle, KVChannel]
    answer: str


def too_small_a_pool(open_one: Open) -> App:
    """Two documents, room for about one of them: the answer from the first one has to compute it again."""
    made = engine()
    broker = open_one(made, pool_bytes=made.layout.num_bytes(600))
    builder = StateGraph(Reading)
    builder.add_node("first", prefill_node(broker, DOCS, writes="docs"))
    builder.add_node("second", prefill_node(broker, DOCS.upper(), writes="more"))
    builder.add_node("reason", generate_node(broker, "{question}", reads="docs", text_to="answer", sampling=FEW))
    builder.add_edge(START, "first")
    builder.add_edge("first", "second")
    builder.add_edge("second", "reason")
    builder.add_edge("reason", END)
    return App(builder.compile(), (broker,), ({"question": "Which city?"},))


PLANTED: dict[Cause, tuple[Callable[..., App], str]] = {
    "volatile": (dated, "agent"),
    "tools": (tools_in_another_order, "agent"),
    "think": (thinks, "agent"),
    "retokenised": (encoded_again, "judge"),
    "system": (another_system_prompt, "agent"),
    "namespace": (another_dtype, "answer"),
    "tenant": (another_tenant, "answer"),
    "evicted": (too_small_a_pool, "reason"),
}
"""An app for each cause, and the node that it is found at."""


# ---------------------------------------------------------------- without any fault


def reads_and_answers(open_one: Open) -> App:
    """Retrieval, plan, answer: the shape of the repository's example."""
    broker = open_one(engine())
    builder = StateGraph(Reading)
    builder.add_node("retrieve", prefill_node(broker, lambda state: DOCS + state["question"], writes="docs"))
    builder.add_node("plan", generate_node(broker, "Plan: {question}", reads="docs", writes="more", sampling=FEW))
    builder.add_node(
        "reason", generate_node(broker, "Now answer: {question}", reads="more", text_to="answer", sampling=FEW)
    )
    builder.add_edge(START, "retrieve")
    builder.add_edge("retrieve", "plan")
    builder.add_edge("plan", "reason")
    builder.add_edge("reason", END)
    return App(builder.compile(), (broker,), ({"question": "Which city?"}, {"question": "Which country is it?"}))


def talks(open_one: Open) -> App:
    return one_agent(open_one(engine()), lambda _: SYSTEM)


def stamps_its_questions(open_one: Open) -> App:
    """Every question gets the time when it arrives, once, and keeps it in the state."""
    broker = open_one(engine())

    def stamp(state: MessagesState) -> dict[str, Any]:
        last = state["messages"][-1]
        return {"messages": [HumanMessage(f"{last.text} (asked at {datetime.now():%H:%M})", id=last.id)]}

    builder = StateGraph(MessagesState)
    builder.add_sequence([("stamp", stamp), ("agent", agent(broker, lambda _: SYSTEM))])
    builder.add_edge(START, "stamp")
    return App(builder.compile(), (broker,))


def speaks(
    open_one: Open,
    write: Callable[[AIMessage], Any] = lambda message: message,
    made: Callable[[], TransformersEngine] = lambda: merging(),
) -> App:
    """A message app on the chat model, with tokens of several bytes: it appends token ids, whatever the text says."""
    model = KVChatModel(open_one(made()), max_tokens=32)

    def node(state: MessagesState) -> dict[str, Any]:
        answer = write(model.invoke([SystemMessage(SYSTEM), *state["messages"]]))
        return {"messages": [AIMessage(answer) if isinstance(answer, str) else answer]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", node)
    builder.add_edge(START, "agent")
    return App(builder.compile(), (model.broker,))


def add(a: int, b: int = 0) -> int:
    """Add two numbers."""
    return a + b


def subtract(a: int, b: int = 0) -> int:
    """Take one number from another."""
    return a - b


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def uses_tools(
    open_one: Open,
    tools: Callable[[int], Sequence[Any]] = lambda _: (add, subtract),
    template: str = templates.HERMES,
) -> App:
    """The loop of a ReAct agent, by hand."""
    broker = open_one(engine(template))
    model = KVChatModel(broker, max_tokens=100)

    def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.bind_tools(tools(len(state["messages"]))).invoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    builder.add_node("agent", agent)
    builder.add_node("tools", ToolNode([add, subtract]))
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", tools_condition)
    builder.add_edge("tools", "agent")
    return App(builder.compile(), (broker,), answers=(CALL, "It is three.", CALL, "It is still three."))


@cache
def merging() -> TransformersEngine:
    return TransformersEngine(tiny.model("llama"), merging_tokenizer(), name="merging")


def merging_tokenizer() -> Any:
    """The tiny tokenizer, but "the" is one token: ``encode("th") + encode("e")`` is not ``encode("the")``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocab = {token: number for number, token in enumerate((*tiny.SPECIAL, *alphabet, *("".join(m) for m in merges)))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = tiny.CHATML
    return fast
