"""Nodes that pass KV handles: ``prefill_node`` reads text once, ``generate_node`` continues a handle.

Knows a broker, and how LangGraph calls a node. Deliberately knows no engine and no channel: a node returns handles under
the keys it was told to write, and what a key does with them is the state's matter. Nothing is cached here: a body that runs
again after an interrupt or a retry asks the broker again, and content-addressed ids make that a hit.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Mapping
from contextvars import copy_context
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config

from aaflow_langgraph.engine.sampling import Sampling
from aaflow_langgraph.engine.turns import check_text
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.prompt import Address, Prompt, state_values
from aaflow_langgraph.graph.source import TextSource, TextSourceLike, text_source
from aaflow_langgraph.graph.stream import ModelCall, report_usage, task_path, usage_dict
from aaflow_langgraph.handle import MAX_LABEL_CHARS, KVHandle, check_label
from aaflow_langgraph.journal import origin
from aaflow_langgraph.results import Usage

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
        reads: Handle to extend: a state key, or ``"key.branch"`` in a ``KVBranches``. None starts fresh.
        role: Chat role of the text. Its turn stays open: the next prompt of the same role continues it.
        raw: Add the text without any chat frame.
        label: Name of the handle for people, at most 64 characters; the key it is written to unless given.
        deterministic: Compute alone and canonically, for bit-equality with a run without any cache.
        usage_to: State key that gets the token counts and times as a plain dict.
        name: Name of the runnable; ``add_node`` has its own.

    Raises:
        ConfigError: An option is wrong. When the node runs: the text is not text, is empty, or a key it needs is missing; in
            that case nothing is written. Way out: fail. The broker's errors pass through.
    """
    if writes is None:
        raise ConfigError("prefill_node writes nothing: name the state key of the handle in writes=")
    options = _Options(
        broker=broker,
        reads=reads,
        writes=writes,
        branch=branch,
        role=role,
        raw=raw,
        label=label,
        deterministic=deterministic,
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
    usage_to: str | None = None,
    name: str | None = None,
) -> KVNode:
    """A node that continues a handle with a prompt, generates, and writes what it was told to name.

    ``builder.add_node("plan", generate_node(broker, "Plan how to answer: {question}", reads="docs", writes="plan"))``

    Args:
        broker: Computes and keeps the KV. The node closes over it.
        prompt: One chat turn. ``{placeholders}`` are plain state keys.
        reads: Handle to continue: a state key, or ``"key.branch"`` in a ``KVBranches``, where the branch may hold
            placeholders. It is never written. None starts fresh.
        writes: State key that gets the handle of the whole conversation, the generated turn included.
        branch: Name in the ``KVBranches`` under ``writes``; may hold placeholders (``"{topic}"``).
        text_to: State key that gets the generated text.
        sampling: How to generate; greedy, at most 256 tokens, unless given. With a temperature and no seed, the seed comes
            from the parent, the prompt, these settings and the task's place in the run: a re-run after an interrupt repeats
            and siblings differ.
        role: Chat role of the prompt.
        raw: Continue the text without any chat frame.
        label: Name of the handle for people, at most 64 characters; the key it is written to unless given.
        deterministic: Compute alone and canonically, for bit-equality with a run without any cache.
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
    options = _Options(
        broker=broker,
        reads=reads,
        writes=writes,
        branch=branch,
        text_to=text_to,
        role=role,
        raw=raw,
        label=label,
        deterministic=deterministic,
        usage_to=usage_to,
    )
    return _GenerateNode(options, parsed, sampling or Sampling(), name or f"generate_{writes or text_to}")


class _Options:
    """What both kinds of node are told: checked once, read-only after."""

    def __init__(
        self,
        *,
        broker: KVBroker,
        reads: str | None,
        writes: str | None,
        branch: str | None,
        role: str,
        raw: bool,
        label: str | None,
        deterministic: bool,
        usage_to: str | None,
        text_to: str | None = None,
    ) -> None:
        named = {"writes": writes, "text_to": text_to, "usage_to": usage_to}
        for option, key in (*named.items(), ("reads", reads), ("branch", branch), ("role", role)):
            if key is not None and not isinstance(key, str):
                raise ConfigError(f"{option} must be text, got {type(key).__name__}")
        self.broker = broker
        self.reads = None if reads is None else Address.parse(reads)
        self.writes = writes
        self.branch = None if branch is None else Prompt.parse(branch, what="branch")
        self.role = check_text(role, "role")
        self.raw = raw
        self.label = None if label is None else check_label(label)
        self.deterministic = deterministic
        self.usage_to = usage_to
        self.text_to = text_to
        keys = [check_text(key, option) for option, key in named.items() if key is not None]
        if len(set(keys)) < len(keys):
            raise ConfigError(f"writes, text_to and usage_to must be different state keys, got {', '.join(keys)}")
        if branch is not None and writes is None:
            raise ConfigError(f"branch={branch!r} needs writes=, the state key of the KVBranches")
        if writes is not None and "." in writes:
            key, _, rest = writes.partition(".")
            raise ConfigError(f"writes={writes!r} is no state key; one branch is writes={key!r}, branch={rest!r}")
        for option, flag in (("raw", raw), ("deterministic", deterministic)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{option} must be True or False, got {flag!r}")
        for method in ("prefill", "generate", "namespace"):
            if not hasattr(broker, method):
                raise ConfigError(f"the first argument must be a KVBroker, got {type(broker).__name__}")


class KVNode(Runnable[Any, dict[str, Any]]):
    """A node of a LangGraph graph that reads and writes KV handles. Made by ``prefill_node`` and ``generate_node``.

    The sync body is the truth; ``ainvoke`` runs it in a thread, with the caller's context, so the event loop stays free.

    Attributes:
        broker: Where the KV lives.
        reads: State key of the handle it extends, or None.
        writes: State key that gets the new handle, or None.
    """

    def __init__(self, options: _Options, name: str) -> None:
        self.name = name
        self.broker = options.broker
        self.reads = None if options.reads is None else options.reads.key
        self.writes = options.writes
        self._options = options

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the node on a state and return its update."""
        return self._run(_Call(self._options, self.name, input, ensure_config(config), None))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the node on a state and return its update.

        Cancelling the task stops the request before its next forward; nothing is written.
        """
        loop = asyncio.get_running_loop()
        call = _Call(self._options, self.name, input, ensure_config(config), loop)
        await self._await_source(call)
        body = loop.run_in_executor(None, copy_context().run, self._run, call)
        # Looked at even when this task is cancelled a second time while it waits for the body to end.
        body.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            return await asyncio.shield(body)
        except asyncio.CancelledError:
            call.cancel.set()
            # Nothing of this node runs on once its task is over.
            await asyncio.wait({body})
            raise

    def _run(self, call: _Call) -> dict[str, Any]:
        """The body, its requests entered in the broker's journal as this node's."""
        with origin(node=call.node, thread=str((call.config.get("configurable") or {}).get("thread_id", ""))):
            return self._body(call)

    @abstractmethod
    def _body(self, call: _Call) -> dict[str, Any]:
        """The update for a call. Runs in any thread."""

    async def _await_source(self, call: _Call) -> None:
        """Await what must be awaited on the loop before the body runs."""

    def _update(self, call: _Call, handle: KVHandle, usage: Usage, text: str | None = None) -> dict[str, Any]:
        """Exactly the keys that the node was told to write."""
        options = self._options
        update: dict[str, Any] = {}
        if options.writes is not None:
            update[options.writes] = handle if call.branch is None else {call.branch: handle}
        if options.text_to is not None:
            update[options.text_to] = text
        if options.usage_to is not None:
            update[options.usage_to] = usage_dict(usage)
        return update


class _Call:
    """One run of a node: what it reads, checked before anything is computed."""

    def __init__(
        self,
        options: _Options,
        name: str | None,
        state: Any,
        config: RunnableConfig,
        loop: asyncio.AbstractEventLoop | None,
    ) -> None:
        self.state = state
        self.config = config
        self.loop = loop
        self.cancel = threading.Event()
        self.text: Any = None
        self.values: Mapping[str, Any] = state_values(state)
        self.node = str((config.get("metadata") or {}).get("langgraph_node") or name)
        self.parent = None if options.reads is None else options.reads.handle(self.values)
        self.branch = None
        if options.branch is not None:
            self.branch = check_text(options.branch.render(self.values), "the branch to write")
        target = ".".join(part for part in (options.writes, self.branch) if part is not None)
        self.label = target[:MAX_LABEL_CHARS] if options.label is None else options.label


class _PrefillNode(KVNode):
    def __init__(self, options: _Options, source: TextSource, name: str) -> None:
        super().__init__(options, name)
        self._source = source

    async def _await_source(self, call: _Call) -> None:
        if self._source.is_async:
            call.text = await self._source.aread(call.state, call.config)

    def _body(self, call: _Call) -> dict[str, Any]:
        if call.loop is None or not self._source.is_async:
            call.text = self._source.read(call.state, call.config)
        prefilled = self.broker.prefill(
            check_text(call.text, f"the text of {self._source.name}"),
            parent=call.parent,
            role=self._options.role,
            raw=self._options.raw,
            label=call.label,
            deterministic=self._options.deterministic,
            cancel=call.cancel,
        )
        report_usage(call.node, prefilled.handle, usage_dict(prefilled.usage))
        return self._update(call, prefilled.handle, prefilled.usage)


class _GenerateNode(KVNode):
    def __init__(self, options: _Options, prompt: Prompt, sampling: Sampling, name: str) -> None:
        super().__init__(options, name)
        self._prompt = prompt
        self._sampling = sampling

    def _body(self, call: _Call) -> dict[str, Any]:
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
                parent=call.parent,
                role=self._options.role,
                raw=self._options.raw,
                sampling=self._sampling,
                label=call.label,
                deterministic=self._options.deterministic,
                seed_path=task_path(call.config),
                on_token=model_call.token,
                cancel=call.cancel,
            )
        except BaseException as error:
            model_call.error(error)
            raise
        model_call.end(generation)
        return self._update(call, generation.handle, generation.usage, generation.text)
