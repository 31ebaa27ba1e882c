"""vLLM on the CPU with prefix caching."""

from __future__ import annotations

import torch

from aaflow_langgraph.bench.peers.process import PeerProcess
from aaflow_langgraph.bench.peers.side import PeerSide

_BLOCK_TOKENS = 128
"""What its CPU backend chooses; smaller blocks are slower there."""

_GIB = 1 << 30


class VLLM(PeerSide):
    """The model folder in bf16, engine and worker in one process: no messages between them, and nothing spins when idle.

    The prefix cache knows whole blocks of 128 tokens: what the context has beyond its last whole block is computed again by
    every agent. With its engine in one process ``VLLM_CPU_OMP_THREADS_BIND`` has no effect; threads are as many as here.
    """

    name = "vllm"
    note = "CPU, bf16, eager, prefix caching in blocks of 128 tokens, all agents in one batch"

    def kv_bytes(self, num_agents: int) -> int:
        """Whole blocks of the context once, the rest of it and what an agent adds in blocks of its own."""
        shared, own = self._blocks()
        return (shared + num_agents * own) * _BLOCK_TOKENS * self._token_bytes

    def _blocks(self) -> tuple[int, int]:
        task = self._task
        shared, rest = divmod(len(task.context_ids), _BLOCK_TOKENS)
        return shared, -(-(rest + task.new + task.output) // _BLOCK_TOKENS)

    def _num_found(self) -> int:
        return self._blocks()[0] * _BLOCK_TOKENS

    def _open(self) -> PeerProcess:
        needed = 2 * max(self.kv_bytes(self._most_agents), (self._window + _BLOCK_TOKENS) * self._token_bytes)
        return PeerProcess(
            "serve_vllm",
            {"model": str(self._folder), "window": self._window, "most_agents": self._most_agents},
            {
                "HF_HUB_OFFLINE": "1",
                "TRANSFORMERS_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_KVCACHE_SPACE": str(-(-needed // _GIB)),
                "OMP_NUM_THREADS": str(torch.get_num_threads()),
            },
        )
