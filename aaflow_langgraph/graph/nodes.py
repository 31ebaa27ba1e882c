"""Nodes that pass KV handles: ``prefill_node`` reads text once, ``generate_node`` continues a handle.

Knows a broker, and how LangGraph calls a node. Deliberately knows no engine and no channel: a node returns handles under
the keys it was told to write, and what a key does with them is the state's matter. Nothing is cached here: a body that runs
again after an interrupt or a retry asks the broker again, and content-addressed ids make that a hit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.turns import check_text
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.node import KVNode, NodeCall, NodeOptions
from aaflow_langgraph.graph.prompt import Address, Prompt
from aaflow_langgraph.graph.source import TextSource, TextSourceLike, text_source
from aaflow_langgraph.graph.stream import ModelCall, report_usage, task_path, usage_dict

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker


def prefill_node(
    broker: KVBroker,
    source: TextSourceLike,
    *,
    writes: str,
    branch: str | None = None,
    reads: str | None = None,
    role: str = "user",
    raw: bool = False,
    label: str | None = None,
    deterministic: bool = False,
    priority: int = 0,
    kv: bool = True,
    usage_to: str | None = None,
    name: str | None = None,
) -> KVNode:
    """A node that runs text through the model once and writes the handle of its KV.

    ``builder.add_node("retrieve", prefill_node(broker, retrieve, writes="docs"))``

    Args:
        broker: Computes and keeps the KV. The node closes over it.
        source: Where the text comes from: a function of the state (sync or async; ``config``, ``runtime``, ``store`` and
            ``writer`` are passed when it asks for them by name, as LangGraph does) that returns text or UTF-8 bytes, a
            LangChain runnable that does, or a prompt with ``{placeholders}``.
        writes: State key that gets the handle.
        branch: Name in the ``KVBranches`` under ``writes``; may hold placeholders (``"{topic}"``). None writes the bare
            handle, for a ``KVChannel``.
        reads: Handle to extend: a state key, or ``"key.branch"`` in a ``KVBranches``. A composite under it is joined first.
            None starts fresh.
        role: Chat role of the text. Its turn stays open: the next prompt of the same role continues it. A ``"judge"``,
            ``"critic"`` or ``"verifier"`` is a user that reads nothing approximate: what ``reads`` holds is computed densely.
        raw: Add the text without any chat frame.
        label: Name of the handle for people, at most 64 characters; the key it is written to unless given.
        deterministic: Compute alone and canonically, for bit-equality with a run without any cache.
        priority: Requests with a smaller number go first; equal ones in the order they came.
        kv: False prefills the whole context and publishes nothing: text passing, for comparison.
        usage_to: State key that gets the token counts and times as a plain dict.
        name: Name of the runnable; ``add_node`` has its own.

    Raises:
        ConfigError: An option is wrong. When the node runs: the text is not text, is empty, or a key it needs is missing; in
            that case nothing is written. Way out: fail. The broker's errors pass through.
    """
    if writes is None:
        raise ConfigError("prefill_node writes nothing: name the state key of the handle in writes=")
    options = NodeOptions(
        broker=broker,
        reads=reads,
        writes=writes,
        branch=branch,
        role=role,
        raw=raw,
        label=label,
        deterministic=deterministic,
        priority=priority,
        kv=kv,
        usage_to=usage_to,
    )
    return _PrefillNode(options, text_source(source), name or f"prefill_{writes}")


def generate_node(
    broker: KVBroker,
    prompt: str,
    *,
    reads: str | None = None,
    writes: str | None = None,
    branch: str | None = None,
    text_to: str | None = None,
    sampling: Sampling | None = None,
    role: str = "user",
    raw: bool = False,
    label: str | None = None,
    deterministic: bool = False,
    priority: int = 0,
    kv: bool = True,
    usage_to: str | None = None,
    name: str | None = None,
) -> KVNode:
    """A node that continues a handle with a prompt, generates, and writes what it was told to name.

    ``builder.add_node("plan", generate_node(broker, "Plan how to answer: {question}", reads="docs", writes="plan"))``

    Args:
        broker: Computes and keeps the KV. The node closes over it.
        prompt: One chat turn. ``{placeholders}`` are plain state keys.
        reads: Handle to continue: a state key, or ``"key.branch"`` in a ``KVBranches``, where the branch may hold
            placeholders. A composite under it is joined first. It is never written. None starts fresh.
        writes: State key that gets the handle of the whole conversation, the generated turn included.
        branch: Name in the ``KVBranches`` under ``writes``; may hold placeholders (``"{topic}"``).
        text_to: State key that gets the generated text.
        sampling: How to generate; greedy, at most 256 tokens, unless given. With a temperature and no seed, the seed comes
            from the parent, the prompt, these settings and the task's place in the run: a re-run after an interrupt repeats
            and siblings differ.
        role: Chat role of the prompt. A ``"judge"``, ``"critic"`` or ``"verifier"`` is a user that reads nothing
            approximate: what ``reads`` holds is computed densely before.
        raw: Continue the text without any chat frame.
        label: Name of the handle for people, at most 64 characters; the key it is written to unless given.
        deterministic: Compute alone and canonically, for bit-equality with a run without any cache.
        priority: Requests with a smaller number go first; equal ones in the order they came.
        kv: False prefills the whole context and publishes nothing: text passing, for comparison.
        usage_to: State key that gets the token counts and times as a plain dict.
        name: Name of the runnable; ``add_node`` has its own.

    Raises:
        ConfigError: An option is wrong, neither ``writes`` nor ``text_to`` is given, or a placeholder is no plain state key.
            When the node runs: a key it needs is missing; in that case nothing is written. Way out: fail. The broker's
            errors pass through.
    """
    if writes is None and text_to is None:
        raise ConfigError(
            "generate_node writes nothing: name a state key in writes= (the handle), text_to= (the text), or both"
        )
    parsed = Prompt.parse(prompt, what="the prompt")
    if reads is not None and Address.parse(reads).key in parsed.keys:
        raise ConfigError(
            f"the prompt names {{{Address.parse(reads).key}}}, which is the handle it reads; leave it out of the text"
        )
    if not isinstance(sampling, Sampling | None):
        raise ConfigError(f"sampling must be a Sampling, got {type(sampling).__name__}")
    options = NodeOptions(
        broker=broker,
        reads=reads,
        writes=writes,
        branch=branch,
        text_to=text_to,
        role=role,
        raw=raw,
        label=label,
        deterministic=deterministic,
        priority=priority,
        kv=kv,
        usage_to=usage_to,
    )
    return _GenerateNode(options, parsed, sampling or Sampling(), name or f"generate_{writes or text_to}")


class _PrefillNode(KVNode):
    def __init__(self, options: NodeOptions, source: TextSource, name: str) -> None:
        super().__init__(options, name)
        self._source = source

    async def _await_source(self, call: NodeCall) -> None:
        if self._source.is_async:
            call.text = await self._source.aread(call.state, call.config)

    def _body(self, call: NodeCall) -> dict[str, Any]:
        if call.loop is None or not self._source.is_async:
            call.text = self._source.read(call.state, call.config)
        prefilled = self.broker.prefill(
            check_text(call.text, f"the text of {self._source.name}"),
            parent=self._parent(call),
            role=self._options.role,
            raw=self._options.raw,
            label=call.label,
            deterministic=self._options.deterministic,
            priority=self._options.priority,
            kv=self._options.kv,
            cancel=call.cancel,
        )
        report_usage(call.node, prefilled.handle, usage_dict(prefilled.usage))
        return self._update(call, prefilled.handle, prefilled.usage)


class _GenerateNode(KVNode):
    def __init__(self, options: NodeOptions, prompt: Prompt, sampling: Sampling, name: str) -> None:
        super().__init__(options, name)
        self._prompt = prompt
        self._sampling = sampling

    def _body(self, call: NodeCall) -> dict[str, Any]:
        prompt = self._prompt.render(call.values)
        model_call = ModelCall(
            call.config,
            call.loop,
            node=call.node,
            model=self.broker.namespace.model,
            role=self._options.role,
            prompt=prompt,
            sampling=self._sampling,
        )
        try:
            generation = self.broker.generate(
                prompt,
                parent=self._parent(call),
                role=self._options.role,
                raw=self._options.raw,
                sampling=self._sampling,
                label=call.label,
                deterministic=self._options.deterministic,
                priority=self._options.priority,
                kv=self._options.kv,
                seed_path=task_path(call.config),
                on_token=model_call.token,
                cancel=call.cancel,
            )
        except BaseException as error:
            model_call.error(error)
            raise
        model_call.end(generation)
        return self._update(call, generation.handle, generation.usage, generation.text)
