"""The real vLLM and llama.cpp as sides of ``bench agents``, where ``make peers`` was run."""

from __future__ import annotations

import os

import pytest
import torch

from aaflow_langgraph import TransformersEngine
from aaflow_langgraph.assets import demo_model
from aaflow_langgraph.bench.peers import VLLM, LlamaCpp, process
from aaflow_langgraph.bench.sides import make_task
from tests.real import real_cache  # noqa: F401 - the fixture

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (process.FOLDER / ".installed").exists(), reason="needs the environment of `make peers`"),
]


@pytest.mark.parametrize(("peer", "most_kl"), [(VLLM, 0.01), (LlamaCpp, 0.1)])
def test_a_peer_answers_like_the_model_behind_a_warm_prefix_and_is_gone_afterwards(
    peer: type[VLLM] | type[LlamaCpp],
    most_kl: float,
    real_cache: None,
) -> None:
    engine = TransformersEngine.load(demo_model(), dtype="float32", device="cpu")
    # Two whole blocks of vLLM's and a rest: with a question of 80 tokens a third block would be found the second time.
    task = make_task(engine, 310, 3, 80, 6)
    side = peer(demo_model(), task, 3)
    try:
        for number in (0, 1):
            ids = torch.tensor([[*task.context_ids, *task.question_ids[number]]])
            with engine.stock_attention(), torch.inference_mode():
                expected = engine.model(ids).logits[0, -1].log_softmax(-1)
            found = side.first_logprobs(number)
            assert found is not None
            assert found.exp().sum() == pytest.approx(1, abs=1e-3)
            assert float((expected.exp() * (expected - found)).sum()) < most_kl
        outcomes = [side.run(3) for _ in range(3)]
        assert len({outcome.token_ids for outcome in outcomes}) == 1
        for outcome in outcomes:
            assert {len(ids) for ids in outcome.token_ids} == {6}
            assert all(0 < first < outcome.total_s for first in outcome.ttft_s)
            assert outcome.cpu_s > 0
        assert side.single_stream(20) > 0
        assert side._process is not None
        pid = side._process._process.pid
    finally:
        side.close()
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)
