"""llama.cpp, by the prebuilt xllamacpp."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from aaflow_langgraph.assets import SMOLLM2, demo_gguf
from aaflow_langgraph.bench.peers.process import PeerProcess
from aaflow_langgraph.bench.peers.side import PeerSide
from aaflow_langgraph.bench.sides import NotRun, Task
from aaflow_langgraph.errors import AAFlowError

_STEP_TOKENS = 256
"""Slots are as long as a multiple of this."""


class LlamaCpp(PeerSide):
    """The GGUF file of the demo model, or the one in the model folder; one slot per agent, each with the whole context."""

    name = "llama.cpp"
    note = (
        "prebuilt library (AVX2); the same weights before they are rounded to bf16 (Q4_1), products in 8 bits; slots share no "
        "prefix: each agent holds the whole context, copied from one prefill before anything is timed"
    )

    def __init__(self, model_folder: Path, task: Task, most_agents: int) -> None:
        super().__init__(model_folder, task, most_agents)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    def kv_bytes(self, num_agents: int) -> int:
        """A slot of the whole conversation for every agent, as far as it is filled."""
        task = self._task
        return num_agents * (len(task.context_ids) + task.new + task.output) * self._token_bytes

    def close(self) -> None:
        """End the server and remove its socket file."""
        super().close()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def _num_found(self) -> int:
        return len(self._task.context_ids)

    def _open(self) -> PeerProcess:
        threads = torch.get_num_threads()
        model = self._gguf()
        self._scratch = tempfile.TemporaryDirectory(prefix="aaflow-llama-")
        window = -(-self._window // _STEP_TOKENS) * _STEP_TOKENS
        options = {"model": str(model), "window": window, "most_agents": self._most_agents, "threads": threads}
        return PeerProcess("serve_llama", {**options, "folder": self._scratch.name}, {"OMP_NUM_THREADS": str(threads)})

    def _gguf(self) -> Path:
        if self._folder.name == SMOLLM2.folder:
            try:
                return demo_gguf(progress=False)
            except AAFlowError as error:
                raise NotRun(f"the GGUF file of the demo model: {error}") from error
        found = sorted(self._folder.glob("*.gguf"))
        if len(found) != 1:
            raise NotRun(f"llama.cpp needs one GGUF file in {self._folder}, which has {len(found)}")
        return found[0]
