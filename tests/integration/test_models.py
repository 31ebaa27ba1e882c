"""What an engine makes of a model: rotary settings, windows, read paths, refusals."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    JambaConfig,
    Lfm2Config,
    MambaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from aaflow_langgraph import KVBroker, TransformersEngine
from aaflow_langgraph.errors import ContextTooLong, UnsupportedModel
from tests import tiny


def frequencies(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "phi", "mistral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_was_cast_has_the_frequencies_of_one_that_was_loaded(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Casting rounds the rotary frequencies, and with them every position: they are put back to fp32."""
    tiny.save(tmp_path, kind, max_position_embeddings=300)
    loaded = TransformersEngine.load(tmp_path, dtype=str(dtype).removeprefix("torch."))
    cast = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(dtype)
    assert any(buffer.dtype == dtype for buffer in frequencies(cast).values())
    engine = TransformersEngine(cast, tiny.tokenizer())
    ours, theirs = frequencies(engine.model), frequencies(loaded.model)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 0
    for name, buffer in ours.items():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, theirs[name]), name
    assert engine.layout.dtype == loaded.layout.dtype == str(dtype).removeprefix("torch.")


def test_namespaces_of_one_checkpoint_are_equal_and_of_others_are_not(tmp_path: Path) -> None:
    tiny.save(tmp_path / "a", max_position_embeddings=300)
    tiny.save(tmp_path / "b", max_position_embeddings=300)
    tiny.save(tmp_path / "seed", max_position_embeddings=300, seed=1)
    tiny.save(
        tmp_path / "rope", max_position_embeddings=300, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    tiny.save(tmp_path / "template", max_position_embeddings=300, template=tiny.CHATML + " ")

    def digest(folder: str, **options: Any) -> str:
        return TransformersEngine.load(tmp_path / folder, **options).namespace.digest

    first = digest("a")
    assert first == digest("b") == digest("a")
    others = [digest(name) for name in ("seed", "rope", "template")]
    others += [digest("a", dtype="bfloat16"), digest("a", dtype="float16"), digest("a", tenant="x")]
    assert len({first, *others}) == len(others) + 1


@pytest.mark.parametrize(
    ("make", "window"),
    [
        (
            lambda: tiny.model(
                max_position_embeddings=2000,
                rope_parameters={
                    "rope_type": "dynamic",
                    "factor": 4.0,
                    "rope_theta": 1e4,
                    "original_max_position_embeddings": 500,
                },
            ),
            500,
        ),
        (
            lambda: AutoModelForCausalLM.from_config(
                Phi3Config(
                    vocab_size=tiny.VOCAB,
                    hidden_size=64,
                    intermediate_size=64,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    max_position_embeddings=2000,
                    original_max_position_embeddings=600,
                    rope_parameters={
                        "rope_type": "longrope",
                        "rope_theta": 1e4,
                        "short_factor": [1.0] * 8,
                        "long_factor": [4.0] * 8,
                        "original_max_position_embeddings": 600,
                    },
                    pad_token_id=0,
                    bos_token_id=None,
                    eos_token_id=None,
                )
            ).eval(),
            600,
        ),
    ],
    ids=["dynamic", "longrope"],
)
def test_a_window_whose_frequencies_change_with_length_is_capped_with_a_warning(
    make: Callable[[], PreTrainedModel], window: int
) -> None:
    """Stored KV must mean the same after the context grew."""
    with pytest.warns(UserWarning, match=f"beyond {window} tokens.*the window is {window} tokens instead of 2000"):
        engine = TransformersEngine(make(), tiny.tokenizer())
    assert engine.window == window
    with KVBroker.open(engine, pool_bytes=1 << 20) as broker, pytest.raises(ContextTooLong, match=str(window)):
        broker.materialize([5] * (window + 1))


def test_a_window_of_fixed_frequencies_is_the_models_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = TransformersEngine(
            tiny.model(
                max_position_embeddings=800,
                rope_parameters={
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 100,
                },
            ),
            tiny.tokenizer(),
        )
    assert engine.window == 800


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("llama", "fast"),
        ("qwen3", "fast"),
        ("phi", "fast"),
        ("gpt2", "fast"),
        ("gemma3", "universal"),
        ("mistral", "universal"),
    ],
)
def test_the_probe_chooses_the_fast_path_where_it_is_right(
    kind: str, path: str, engines: Callable[..., TransformersEngine]
) -> None:
    assert engines(kind).read_path == path
    assert dict(engines(kind).namespace.facts)["read_path"] == path


SHARED = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
HYBRIDS: dict[str, Callable[[], Any]] = {
    "mamba": lambda: MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4),
    "jamba": lambda: JambaConfig(
        **SHARED, num_hidden_layers=2, attn_layer_period=2, attn_layer_offset=1, num_experts=1, num_experts_per_tok=1,
        expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4, use_mamba_kernels=False,
    ),
    "bamba": lambda: BambaConfig(
        **SHARED, num_hidden_layers=2, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1,
        mamba_d_state=4,
    ),
    "qwen3-next": lambda: Qwen3NextConfig(
        **SHARED, num_hidden_layers=2, head_dim=8, layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=16, shared_expert_intermediate_size=16, linear_key_head_dim=8,
        linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=2,
    ),
    "lfm2": lambda: Lfm2Config(
        **SHARED, num_hidden_layers=2, layer_types=["conv", "full_attention"],
    ),
    "recurrent-gemma": lambda: RecurrentGemmaConfig(
        **SHARED, num_hidden_layers=3, lru_width=32, attention_window_size=16,
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")  # their own, about kernels that are not installed
@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_model_with_recurrent_or_convolutional_state_is_refused_by_layer_and_reason(kind: str) -> None:
    """Case 5, transformers#49036, vllm#51250: such a state cannot be cut at a prefix."""
    model = AutoModelForCausalLM.from_config(HYBRIDS[kind]())
    with pytest.raises(UnsupportedModel, match=r"layer \d") as caught:
        TransformersEngine(model, tiny.tokenizer())
    message = str(caught.value)
    assert any(word in message for word in ("recurrent", "convolutional"))
    assert "all attention" in message
    assert type(model).__name__ in message
