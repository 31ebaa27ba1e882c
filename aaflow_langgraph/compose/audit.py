"""Does a composite say the same as its tokens computed densely, and does its moved KV say anything at all?

Next-token distributions behind the last token, four times: with the composite's KV, computed densely, and with three
mismatched caches of the same shape in place of the moved KV: another text's, zeroes, noise of the same spread. Costs two
dense runs. Everything is computed beside the composite, which is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aaflow_langgraph.compose import dense
from aaflow_langgraph.compose.work import Work
from aaflow_langgraph.engine.mixed import Mixed, run_at
from aaflow_langgraph.results import Audit

_OTHER_TEXT = 7919
"""Another text: every id moved on by this prime, modulo the vocabulary."""


def audit(work: Work) -> Audit:
    """Compare a finished composite."""
    moved, last = work.moved, len(work.token_ids) - 1
    where = torch.tensor(moved, dtype=torch.long, device=work.mixed.rows.device) - work.mixed.start
    vocab = work.engine.vocab_size
    everything = dense.positions(work)
    _, right = _computed(work, everything, [work.token_ids[at] for at in everything])
    other, _ = _computed(work, everything, [(work.token_ids[at] + _OTHER_TEXT) % vocab for at in everything])

    def control(fill: Callable[[torch.Tensor], torch.Tensor]) -> float:
        rows = work.mixed.rows.clone()
        rows[..., where, :] = fill(rows[..., where, :])
        return _kl(right, _behind(work, rows, last))

    generator = torch.Generator("cpu").manual_seed(0)

    def noise(kv: torch.Tensor) -> torch.Tensor:
        drawn = torch.randn(kv.shape, generator=generator, device="cpu").to(kv.device)
        return (drawn * kv.float().std((3, 4), keepdim=True)).to(kv.dtype)

    composed = _behind(work, work.mixed.rows.clone(), last)
    return Audit(
        kl=_kl(right, composed),
        top1=bool(right.argmax() == composed.argmax()),
        kl_control_other=control(lambda _: other[..., where, :]),
        kl_control_zeroed=control(torch.zeros_like),
        kl_control_random=control(noise),
    )


def _computed(work: Work, positions: Sequence[int], token_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with tokens computed densely behind the same past, and the logits behind the last."""
    rows = work.mixed.rows.clone()
    logits = run_at(work.engine, token_ids, positions, Mixed(work.mixed.pieces, rows, work.mixed.start))
    return rows, logits


def _behind(work: Work, rows: torch.Tensor, last: int) -> torch.Tensor:
    """Logits of the last token over rows."""
    return run_at(work.engine, [work.token_ids[last]], [last], Mixed(work.mixed.pieces, rows, work.mixed.start))


def _kl(right: torch.Tensor, other: torch.Tensor) -> float:
    """Divergence of ``other`` from ``right``, in nats."""
    p, q = right.float().log_softmax(-1), other.float().log_softmax(-1)
    return max(0.0, float((p.exp() * (p - q)).sum()))
