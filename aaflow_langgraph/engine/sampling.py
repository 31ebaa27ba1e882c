"""How the next token is chosen. Pure: logits, settings and a generator in, one token id out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aaflow_langgraph.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to generate.

    Attributes:
        max_tokens: Most new tokens, at least 1.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: Keep only the k most likely tokens; 0 keeps all.
        top_p: Keep the smallest set of tokens whose probability reaches this; 1 keeps all.
        seed: Seed of the draw. None: a seed is derived from parent, prompt and settings, so that a re-run repeats.
        stop: Generation ends before the first of these strings appears in the text.
        logprobs: Report the log-probability of each chosen token (of the untempered distribution).

    Raises:
        ConfigError: A value is out of range; the message names the field. Way out: fail.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ConfigError(f"max_tokens must be an int of at least 1, got {self.max_tokens!r}")
        if type(self.temperature) not in (int, float) or not 0.0 <= self.temperature <= 100.0:
            raise ConfigError(f"temperature must lie in [0, 100], got {self.temperature!r}")
        if type(self.top_k) is not int or self.top_k < 0:
            raise ConfigError(f"top_k must be an int of at least 0 (0 keeps all tokens), got {self.top_k!r}")
        if type(self.top_p) not in (int, float) or not 0.0 < self.top_p <= 1.0:
            raise ConfigError(f"top_p must lie in (0, 1], got {self.top_p!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed < 1 << 63):
            raise ConfigError(f"seed must be None or an int in [0, 2**63), got {self.seed!r}")
        if not isinstance(self.stop, list | tuple) or not all(isinstance(s, str) and s for s in self.stop):
            raise ConfigError(f"stop must be a tuple of non-empty strings, got {self.stop!r}")
        if not isinstance(self.logprobs, bool):
            raise ConfigError(f"logprobs must be True or False, got {self.logprobs!r}")
        object.__setattr__(self, "stop", tuple(self.stop))


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """One token id from ``logits`` (``[vocab]``, any float dtype, not mutated).

    The draw uses fp64 cumulative sums on the CPU, so a seed gives the same token on every device.
    """
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    scaled = logits.detach().to("cpu", torch.float64) / sampling.temperature
    ordered, ids = scaled.sort(descending=True, stable=True)
    if sampling.top_k:
        ordered, ids = ordered[: sampling.top_k], ids[: sampling.top_k]
    probabilities = ordered.softmax(-1)
    cumulative = probabilities.cumsum(-1)
    if sampling.top_p < 1.0:
        # The first token is always kept: keep every token whose mass before it is still below top_p.
        num_kept = int((cumulative - probabilities < sampling.top_p).sum())
        cumulative, ids = cumulative[:num_kept], ids[:num_kept]
    draw = torch.rand((), generator=generator, dtype=torch.float64, device="cpu") * cumulative[-1]
    return int(ids[int(torch.searchsorted(cumulative, draw, right=True).clamp(max=len(ids) - 1))])


def log_probability(logits: torch.Tensor, token_id: int) -> float:
    """Natural log-probability of ``token_id`` under ``logits`` (``[vocab]``), computed in fp32."""
    row = logits.float()
    return float(row[token_id] - row.logsumexp(-1))
