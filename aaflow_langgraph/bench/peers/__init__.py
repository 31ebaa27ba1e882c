"""Other engines as sides of ``bench agents``: vLLM on the CPU and llama.cpp, in an environment of their own (``make peers``).

Never a dependency: nothing here imports them. The files in ``servers/`` run in that environment and import nothing of ours.
"""

from aaflow_langgraph.bench.peers.llama_cpp import LlamaCpp
from aaflow_langgraph.bench.peers.vllm import VLLM

__all__ = ["VLLM", "LlamaCpp"]
