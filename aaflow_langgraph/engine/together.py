"""Several requests in one forward through the model's own modules: for models that the lean forward does not know.

All their new tokens stand in one row, each at its own position; everything but attention treats tokens one by one, and
attention is ours. Knows an engine's model and ``SharedPast``; knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from aaflow_langgraph.engine import attention, cache_adapter
from aaflow_langgraph.engine.batch import Step
from aaflow_langgraph.engine.kernel import Kernel, KernelPast
from aaflow_langgraph.engine.shared_attention import SharedPast, TailRoom

if TYPE_CHECKING:
    from aaflow_langgraph.engine.transformers import TransformersEngine


def together(
    engine: TransformersEngine, steps: Sequence[Step], kernel: Kernel | None, room: TailRoom
) -> list[torch.Tensor]:
    """Logits ``[vocab]`` after the last token of every step. The caller holds the engine's lock."""
    counts, pasts = [len(step.token_ids) for step in steps], [step.past for step in steps]
    past = SharedPast(pasts, counts, room) if kernel is None else KernelPast(kernel, pasts, counts)
    ids = [token_id for step in steps for token_id in step.token_ids]
    positions = torch.cat(
        [
            step.position
            if isinstance(step.position, torch.Tensor)
            else torch.arange(step.position, step.position + count, device=engine.device)
            for step, count in zip(steps, counts, strict=True)
        ]
    )
    layers = [cache_adapter.FastLayer(n, past.write_layer, lambda: 0) for n in range(engine.layout.num_layers)]
    last = torch.tensor(counts, device=engine.device).cumsum(0) - 1
    with attention.reading(past):
        logits = engine.forward_rows(ids, positions, cache_adapter.as_cache(layers), last)
    past.finish()
    return [row.clone() for row in logits]
