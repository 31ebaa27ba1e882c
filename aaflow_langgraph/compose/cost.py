"""What a rung costs on this machine, predicted from a few forwards measured once per model and kept beside its probe.

    seconds of running T tokens  =  per_chunk * chunks  +  per_token * T  +  per_pair * (pairs of query and key)
    seconds of moving T tokens   =  per_moved * T

Wall-clock seconds on whatever else the machine was doing: they choose between rungs that differ by factors, no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch

from aaflow_langgraph.engine.fingerprint import read_cached, write_cached
from aaflow_langgraph.engine.mixed import Mixed, run_at
from aaflow_langgraph.engine.rotary import Rotation
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.hashing import digest

CHUNK_TOKENS = 256
_LONG_TOKENS = 2048
_SHORT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Costs:
    """Coefficients, in seconds."""

    per_chunk: float
    per_token: float
    per_pair: float
    per_moved: float

    def run(self, positions: Sequence[int]) -> float:
        """Predicted seconds of running tokens at these positions."""
        chunks = -(-len(positions) // CHUNK_TOKENS)
        return self.per_chunk * chunks + self.per_token * len(positions) + self.per_pair * sum(positions)

    def check(self, positions: Sequence[int], num_layers: int) -> float:
        """Predicted seconds of checking tokens at layer 1: one layer of them, and a part of the next."""
        return self.run(positions) * 1.3 / num_layers

    def move(self, num_tokens: int) -> float:
        """Predicted seconds of moving tokens."""
        return self.per_moved * num_tokens


def costs_of(engine: TransformersEngine, rotation: Rotation, clock: Callable[[], float] = time.perf_counter) -> Costs:
    """The coefficients of an engine on this machine; measured when they are not known."""
    key = digest("costs-1", engine.namespace.digest, str(torch.get_num_threads()), engine.read_path, torch.__version__)
    known = read_cached("costs", key)
    if known is not None:
        try:
            return Costs(**known)
        except TypeError:
            pass  # a damaged note is measured again
    made = _measure(engine, rotation, clock)
    write_cached("costs", key, asdict(made))
    return made


def _measure(engine: TransformersEngine, rotation: Rotation, clock: Callable[[], float]) -> Costs:
    chunk, short = min(CHUNK_TOKENS, engine.window // 4), min(_SHORT_TOKENS, engine.window // 8)
    long = min(_LONG_TOKENS, engine.window - chunk)
    rows = torch.zeros(engine.layout.shape(long + chunk), dtype=engine.model.dtype, device=engine.device)
    ids = [number % engine.vocab_size for number in range(chunk)]
    mixed = Mixed((), rows, 0)

    def seconds(count: int, start: int) -> float:
        best = float("inf")
        for _ in range(2):
            began = clock()
            run_at(engine, ids[:count], range(start, start + count), mixed)
            best = min(best, clock() - began)
        return best

    first, whole, behind = seconds(short, 0), seconds(chunk, 0), seconds(chunk, long)
    began = clock()
    rotation.move(rows[..., :chunk, :], 1, rows[..., chunk : 2 * chunk, :])
    moved = clock() - began
    per_token = max(0.0, (whole - first) / (chunk - short))
    return Costs(
        per_chunk=max(0.0, first - short * per_token),
        per_token=per_token,
        per_pair=max(0.0, (behind - whole) / (chunk * long)),
        per_moved=moved / chunk,
    )
