"""What it costs to compute an extent again, in one place. Relative numbers: policies only compare them.

A token at position ``p`` costs ``2 * parameters`` operations for the weights and ``4 * layers * width * p`` for attending
to what stands before it. With the weights as the unit that is ``1 + p / EVEN_TOKENS``, where ``EVEN_TOKENS`` =
``parameters / (2 * layers * width)`` is the position from which attention costs more than the weights.
"""

from __future__ import annotations

EVEN_TOKENS = 4096
"""By counting 3,100 for SmolLM2-135M, 15,000 for Qwen2.5-1.5B, 27,000 for Llama-3-8B; less where attention runs at a
lower rate than the weights, as on CPUs."""


def recompute_cost(start: int, num_tokens: int) -> float:
    """Cost of prefilling tokens ``[start, start + num_tokens)`` behind a prefix that is there, in tokens at position 0."""
    return num_tokens * (1 + (start + (num_tokens - 1) / 2) / EVEN_TOKENS)
