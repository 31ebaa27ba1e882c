"""What the two peers have in common as sides: one warm server, the context in its cache before anything is timed."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import torch

from aaflow_langgraph.bench.peers.process import PeerProcess
from aaflow_langgraph.bench.sides import NotRun, Outcome, Task

_STREAM_TOKENS = 512
"""Room for a single stream behind the longest prompt."""


class PeerSide(ABC):
    """A side in a process of its own. The server starts at the first use and stays until ``close``.

    Times are the server's: from the moment it has a request's token ids, not from when they went into the pipe. CPU seconds
    are the server's and its children's while it worked, and this process's while it waited.
    """

    name: str
    note: str
    is_serial = False
    computed: tuple[str, ...] = ("kv_bytes",)

    def __init__(self, model_folder: Path, task: Task, most_agents: int) -> None:
        self._folder = model_folder
        self._task = task
        self._most_agents = most_agents
        self._process: PeerProcess | None = None
        self._failed: NotRun | None = None
        self._tried: set[int] = set()

    def run(self, num_agents: int) -> Outcome:
        """See ``Side.run``. Each number of agents runs once untimed before it is timed: kernels are prepared per shape."""
        if num_agents not in self._tried:
            self._generate(num_agents, self._task.output)
            self._tried.add(num_agents)
        cpu = time.process_time()
        answer = self._generate(num_agents, self._task.output)
        return Outcome(
            token_ids=tuple(tuple(ids) for ids in answer["token_ids"]),
            ttft_s=tuple(answer["first_s"]),
            total_s=max(answer["end_s"]),
            cpu_s=answer["cpu_s"] + time.process_time() - cpu,
        )

    def single_stream(self, num_tokens: int) -> float:
        """See ``Streaming.single_stream``."""
        if not 2 <= num_tokens <= _STREAM_TOKENS:
            raise NotRun(f"a single stream of {num_tokens} tokens: {self.name} was opened for 2 to {_STREAM_TOKENS}")
        answer = self._generate(1, num_tokens)
        return float((num_tokens - 1) / (answer["end_s"][0] - answer["first_s"][0]))

    def first_logprobs(self, number: int) -> torch.Tensor | None:
        """See ``Side.first_logprobs``."""
        self._ask("rewind", num_agents=1)
        answer = self._ask("first_logprobs", question=list(self._task.question_ids[number]))
        return torch.tensor(answer["logprobs"], dtype=torch.float32)

    @abstractmethod
    def kv_bytes(self, num_agents: int) -> int:
        """See ``Side.kv_bytes``; computed from its block or slot size."""

    def close(self) -> None:
        """End the server. A later call starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None
        self._tried.clear()

    @abstractmethod
    def _open(self) -> PeerProcess:
        """Start the server."""

    @abstractmethod
    def _num_found(self) -> int:
        """Tokens of the context that the peer's cache holds: no more and no less must be found by each agent."""

    @property
    def _window(self) -> int:
        """Tokens that one request may have."""
        task = self._task
        most = int(self._config["max_position_embeddings"])
        return min(most, len(task.context_ids) + task.new + max(task.output, _STREAM_TOKENS))

    @property
    def _token_bytes(self) -> int:
        """Bytes of keys and values of one token in 16 bits."""
        config = self._config
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        return int(config["num_hidden_layers"] * 2 * heads * size * 2)

    @property
    def _config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads((self._folder / "config.json").read_bytes())
        except OSError as error:
            raise NotRun(f"needs a model folder with a config.json, {self._folder} has none") from error
        if "num_hidden_layers" not in config or "max_position_embeddings" not in config:
            raise NotRun(
                f"config.json of {self._folder} names no layers or no window: only plain text models are measured"
            )
        return config

    def _generate(self, num_agents: int, num_tokens: int) -> dict[str, Any]:
        self._ask("rewind", num_agents=num_agents)
        questions = [list(ids) for ids in self._task.question_ids[:num_agents]]
        answer = self._ask("generate", questions=questions, max_tokens=num_tokens)
        if set(answer["num_cached"]) != {self._num_found()}:
            raise NotRun(
                f"{self.name} found {sorted(set(answer['num_cached']))} tokens of each prompt in its cache, "
                f"{self._num_found()} should be there: what it took says nothing about a warm prefix"
            )
        if {len(ids) for ids in answer["token_ids"]} != {num_tokens}:
            raise NotRun(f"{self.name} did not generate {num_tokens} tokens for every agent")
        return answer

    def _ask(self, do: str, **request: Any) -> dict[str, Any]:
        """One answer of the warm server. What failed once is not tried again."""
        if self._failed is not None:
            raise self._failed
        try:
            if self._process is None:
                self._process = self._open()
                self._process.ask("warm", context=list(self._task.context_ids))
            return self._process.ask(do, **request)
        except NotRun as error:
            self._failed = error
            raise
