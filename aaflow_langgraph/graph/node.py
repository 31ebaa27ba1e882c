"""``KVNode``: how LangGraph calls a node that passes KV handles, and what every kind of node is told.

Knows a broker, a state and LangGraph's two colours. Knows no kind of node: what the body does is the subclass's matter.
"""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from langchain_core.runnables import Runnable, RunnableConfig
from langchain_core.runnables.config import ensure_config

from aaflow_langgraph.engine.line import check_priority
from aaflow_langgraph.engine.turns import check_text
from aaflow_langgraph.errors import ConfigError
from aaflow_langgraph.graph.gate import JUDGES, handle_to_read
from aaflow_langgraph.graph.prompt import Address, Prompt, state_values
from aaflow_langgraph.graph.stream import usage_dict
from aaflow_langgraph.handle import MAX_LABEL_CHARS, KVHandle, check_label
from aaflow_langgraph.journal import origin
from aaflow_langgraph.results import Usage
from aaflow_langgraph.threads import in_thread

if TYPE_CHECKING:
    from aaflow_langgraph.broker import KVBroker


class NodeOptions:
    """What every kind of node is told: checked once, read-only after."""

    def __init__(
        self,
        *,
        broker: KVBroker,
        writes: str | None,
        label: str | None,
        deterministic: bool,
        reads: str | None = None,
        branch: str | None = None,
        role: str = "user",
        raw: bool = False,
        usage_to: str | None = None,
        text_to: str | None = None,
        kv: bool = True,
        priority: int = 0,
    ) -> None:
        named = {"writes": writes, "text_to": text_to, "usage_to": usage_to}
        for option, key in (*named.items(), ("reads", reads), ("branch", branch), ("role", role)):
            if key is not None and not isinstance(key, str):
                raise ConfigError(f"{option} must be text, got {type(key).__name__}")
        self.broker = broker
        self.reads = None if reads is None else Address.parse(reads)
        self.writes = writes
        self.branch = None if branch is None else Prompt.parse(branch, what="branch")
        if role.lower() in JUDGES and role not in JUDGES:
            raise ConfigError(f"role={role!r} is no chat role; a node that judges is marked role={role.lower()!r}")
        self.gate = f"role: {role}" if role in JUDGES else ""
        self.role = "user" if self.gate else check_text(role, "role")
        self.raw = raw
        self.label = None if label is None else check_label(label)
        self.deterministic = deterministic
        self.kv = kv
        self.priority = check_priority(priority)
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
        for option, flag in (("raw", raw), ("deterministic", deterministic), ("kv", kv)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{option} must be True or False, got {flag!r}")
        for method in ("prefill", "generate", "namespace"):
            if not hasattr(broker, method):
                raise ConfigError(f"the first argument must be a KVBroker, got {type(broker).__name__}")


class KVNode(Runnable[Any, dict[str, Any]]):
    """A node of a LangGraph graph that reads and writes KV handles. Made by the factories of ``nodes``.

    The sync body is the truth; ``ainvoke`` runs it in a thread, with the caller's context, so the event loop stays free.

    Attributes:
        broker: Where the KV lives.
        reads: State key of the handle it extends, or None.
        read_keys: Every state key whose handles it reads.
        writes: State key that gets the new handle, or None.
    """

    def __init__(self, options: NodeOptions, name: str) -> None:
        self.name = name
        self.broker = options.broker
        self.reads = None if options.reads is None else options.reads.key
        self.read_keys: tuple[str, ...] = () if self.reads is None else (self.reads,)
        self.writes = options.writes
        self._options = options

    def invoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the node on a state and return its update."""
        return self._run(NodeCall(self._options, self.name, input, ensure_config(config), None))

    async def ainvoke(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> dict[str, Any]:
        """Run the node on a state and return its update.

        Cancelling the task stops the request before its next forward; nothing is written.
        """
        loop = asyncio.get_running_loop()
        call = NodeCall(self._options, self.name, input, ensure_config(config), loop)
        await self._await_source(call)
        return await in_thread(partial(self._run, call), call.cancel)

    def _run(self, call: NodeCall) -> dict[str, Any]:
        """The body, its requests entered in the broker's journal as this node's."""
        with origin(node=call.node, thread=str((call.config.get("configurable") or {}).get("thread_id", ""))):
            return self._body(call)

    def _parent(self, call: NodeCall) -> KVHandle | None:
        """The handle to continue; what has to be joined or computed for it, is."""
        options = self._options
        if call.read is None:
            return None
        return handle_to_read(
            self.broker,
            call.read,
            node=call.node,
            gate=options.gate,
            deterministic=options.deterministic,
            kv=options.kv,
        )

    @abstractmethod
    def _body(self, call: NodeCall) -> dict[str, Any]:
        """The update for a call. Runs in any thread."""

    async def _await_source(self, call: NodeCall) -> None:
        """Await what must be awaited on the loop before the body runs."""

    def _update(self, call: NodeCall, handle: KVHandle, usage: Usage, text: str | None = None) -> dict[str, Any]:
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


class NodeCall:
    """One run of a node: what it reads, checked before anything is computed."""

    def __init__(
        self,
        options: NodeOptions,
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
        self.read = None if options.reads is None else options.reads.handle(self.values)
        self.branch = None
        if options.branch is not None:
            self.branch = check_text(options.branch.render(self.values), "the branch to write")
        target = ".".join(part for part in (options.writes, self.branch) if part is not None)
        self.label = target[:MAX_LABEL_CHARS] if options.label is None else options.label
