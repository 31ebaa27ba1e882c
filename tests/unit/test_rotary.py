"""Which models' keys can be moved is found out by running them, and moved keys are the keys of the other place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, JambaConfig, MambaConfig

from aaflow_langgraph.engine import rotary
from aaflow_langgraph.engine.transformers import TransformersEngine
from aaflow_langgraph.errors import NotComposable, UnsupportedModel
from tests import tiny

Engines = Callable[..., TransformersEngine]

_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
    "rope_theta": 1e4,
}
_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
_DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "mistral": ("mistral", {}),
    "phi": ("phi", {}),
    "cohere": ("cohere", {}),
    "glm": ("glm", {}),
    "smollm3": ("smollm3", {}),
    "yarn": ("llama", {"rope_parameters": _YARN}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}),
    "linear": ("llama", {"rope_parameters": _LINEAR}),
    "dynamic": ("llama", {"rope_parameters": _DYNAMIC}),
}


def encode(engine: TransformersEngine, ids: list[int], position: int) -> torch.Tensor:
    """KV ``[L, 2, H, T, D]`` by the model's own forward and its own cache, positions given."""
    with torch.no_grad(), engine.stock_attention():
        positions = torch.arange(position, position + len(ids))[None]
        output = engine.model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=True)
    cache = getattr(output, "cache", None) or output.past_key_values
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


@pytest.mark.parametrize("by", [1, 300, -700, 2500])
@pytest.mark.parametrize("name", MODELS)
def test_moved_keys_equal_keys_computed_there(engines: Engines, name: str, by: int) -> None:
    kind, changes = MODELS[name]
    engine = engines(kind, **changes)
    num_tokens = 8 if kind == "mistral" else 20  # the stock cache drops what a window has passed
    ids = tiny.words(num_tokens, seed=3)
    start = 700 if by < 0 else 0
    kv, wanted = encode(engine, ids, start), encode(engine, ids, start + by)
    moved = torch.full_like(kv, float("nan"))
    rotary.rotation_of(engine).move(kv, by, moved)
    assert torch.equal(moved[:, 1], kv[:, 1])
    for layer in range(kv.shape[0]):
        off = (moved[layer, 0] - wanted[layer, 0]).norm() / wanted[layer, 0].norm()
        assert off < 1e-5 * max(1.0, abs(by) / 1000), f"layer {layer}"


def test_the_probe_finds_pairing_and_rotated_dims(engines: Engines) -> None:
    def found(kind: str) -> list[tuple[str, str, int]]:
        return [(x.kind, x.pairing, x.num_rotated) for x in rotary.rotation_of(engines(kind)).layers]

    assert found("llama") == [("rotary", "halves", 16)] * 3
    assert found("phi") == [("rotary", "halves", 8)] * 3
    assert found("cohere") == [("rotary", "interleaved", 16)] * 3
    assert found("glm") == [("rotary", "interleaved", 8)] * 3
    assert [x[0] for x in found("smollm3")] == ["rotary", "nope", "rotary"]
    assert len({x.frequencies for x in rotary.rotation_of(engines("gemma3")).layers}) == 2


@pytest.mark.parametrize(("name", "kind"), [("llama", "llama"), ("gemma3", "gemma3"), ("phi", "phi"), ("glm", "glm")])
def test_bf16_models_are_recognised_and_keys_are_rounded_once(engines: Engines, name: str, kind: str) -> None:
    half, full = engines(kind, dtype=torch.bfloat16), engines(kind)
    rotation = rotary.rotation_of(half)
    assert rotation.layers == rotary.rotation_of(full).layers
    kv = encode(full, tiny.words(20), 0).bfloat16()
    wanted = torch.empty(kv.shape)
    rotary.rotation_of(full).move(kv.float(), 900, wanted)
    moved = torch.empty_like(kv)
    rotation.move(kv, 900, moved)
    assert torch.equal(moved, wanted.bfloat16())


def test_a_move_by_nothing_is_a_copy_and_back_again_is_where_it_was(engines: Engines) -> None:
    rotation = rotary.rotation_of(engines("phi"))
    kv = torch.randn(3, 2, 4, 50, 16)
    copied, there, back = (torch.empty_like(kv) for _ in range(3))
    rotation.move(kv, 0, copied)
    assert torch.equal(copied, kv)
    rotation.move(kv, 123, there)
    rotation.move(there, -123, back)
    assert not torch.allclose(there, kv, atol=1e-2)
    assert torch.allclose(back, kv, atol=1e-5)


def test_moves_read_and_write_views_and_touch_nothing_beside_them(engines: Engines) -> None:
    rotation = rotary.rotation_of(engines("llama"))
    # More than one tile of layers, and a layer larger than a tile.
    for num_tokens in (40, 9000):
        source, target = torch.randn(3, 2, 2, num_tokens + 20, 16), torch.full((3, 2, 2, num_tokens + 40, 16), 7.0)
        part = source[..., 10 : 10 + num_tokens, :]
        before = source.clone()
        rotation.move(part, 55, target[..., 30 : 30 + num_tokens, :])
        wanted = torch.empty_like(part)
        for layer in range(3):
            rotation.move(part[layer : layer + 1].expand(3, -1, -1, -1, -1), 55, (row := torch.empty_like(part)))
            wanted[layer] = row[layer]
        assert torch.equal(target[..., 30 : 30 + num_tokens, :], wanted)
        assert torch.equal(source, before)
        assert (target[..., :30, :] == 7).all()
        assert (target[..., 30 + num_tokens :, :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_learned_positions_are_refused_by_layer_and_reason(engines: Engines, kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(NotComposable, match=r"layer 0 of \w+ computes other values .*learned absolute positions"):
        rotary.rotation_of(engines(kind, dtype=dtype))


def test_alibi_is_refused_and_named(engines: Engines) -> None:
    with pytest.raises(NotComposable, match=r"layer 0 of Bloom\w+, as all others, .* no rotary frequencies: .*ALiBi"):
        rotary.rotation_of(engines("bloom"))


def test_multimodal_rotary_is_refused(engines: Engines) -> None:
    parameters = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    with pytest.raises(NotComposable, match="layer 0 .*multimodal rotary"):
        rotary.rotation_of(engines("llama", rope_parameters=parameters))


def test_keys_that_move_otherwise_are_refused_with_the_error(engines: Engines) -> None:
    """A model whose rotary module does not do what its frequencies say."""
    made = tiny.model("phi")
    engine = TransformersEngine(made, tiny.tokenizer(), name="odd")
    made.model.rotary_emb.register_forward_hook(lambda _module, _inputs, out: (out[0].flip(-1), out[1].flip(-1)))
    with pytest.raises(NotComposable, match=r"layer 0 of Phi\w+ .* not by a rotation .*inv_freq.*: off by \d"):
        rotary.rotation_of(engine)


def test_a_model_that_goes_by_order_instead_of_positions_is_refused() -> None:
    """Its keys move, but its attention ignores the mask that says which position sees which."""
    made = tiny.model("gemma3", sliding_window=600)
    engine = TransformersEngine(made, tiny.tokenizer(), name="by order")
    for layer in made.model.layers:
        layer.register_forward_pre_hook(_forget_scattered_mask, with_kwargs=True)
    with pytest.raises(
        NotComposable, match=r"Gemma3\w+, or a later one, computes something else for tokens at scattered"
    ):
        rotary.rotation_of(engine)


def _forget_scattered_mask(_module: Any, inputs: Any, options: dict[str, Any]) -> Any:
    mask = options["attention_mask"]
    if mask is not None and mask.shape[-1] != mask.shape[-2]:
        options["attention_mask"] = torch.zeros_like(mask)
    return inputs, options


def test_a_refusal_is_remembered(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engines("gpt2")
    with pytest.raises(NotComposable) as first:
        rotary.rotation_of(engine)
    monkeypatch.setattr(rotary, "_probe", None)
    with pytest.raises(NotComposable) as second:
        rotary.rotation_of(engine)
    assert str(first.value) == str(second.value)


def test_a_checkpoint_is_probed_once_for_all_processes(
    tmp_path: Path, private_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.save(tmp_path / "model", "gemma3", seed=11)
    first = rotary.rotation_of(TransformersEngine.load(folder, device="cpu"))
    again = TransformersEngine.load(folder, device="cpu")
    with monkeypatch.context() as patched:
        patched.setattr(rotary, "_probe", None)
        second = rotary.rotation_of(again)
    assert second.layers == first.layers
    assert second.windows == (24, None, 24)
    kv = torch.randn(3, 2, 2, 9, 16)
    one, two = torch.empty_like(kv), torch.empty_like(kv)
    first.move(kv, 77, one)
    second.move(kv, 77, two)
    assert torch.equal(one, two)
    # A file that says anything else is as good as none.
    for file in (private_cache / "aaflow-langgraph" / "rotary").glob("*.json"):
        file.write_text(json.dumps([["rotary", "no.such.buffer", "halves", 16]] * 3))
    again.rotation = None
    assert rotary.rotation_of(again).layers == first.layers


def test_windows_shorter_than_the_composite_are_refused_by_layer(engines: Engines) -> None:
    rotation = rotary.rotation_of(engines("mistral"))
    rotation.check_span(8)
    with pytest.raises(NotComposable, match=r"layer 0 attends to the last 8 tokens only and the composite has 9"):
        rotation.check_span(9)
    gemma = rotary.rotation_of(engines("gemma3"))
    gemma.check_span(24)
    with pytest.raises(NotComposable, match="layer 0 .* last 24 tokens"):
        gemma.check_span(25)
    rotary.rotation_of(engines("llama")).check_span(4096)


def test_frequencies_that_change_with_length_are_refused_beyond_it(engines: Engines) -> None:
    rotation = rotary.rotation_of(engines("llama", rope_parameters=_DYNAMIC))
    rotation.check_span(4096)
    with pytest.raises(NotComposable, match=r"layer 0 .* up to 4096 tokens and the composite has 4097: .*\(dynamic\)"):
        rotation.check_span(4097)
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "factor": 2.0,
        "original_max_position_embeddings": 2048,
    }
    made = tiny.model("llama", rope_parameters=longrope)
    with pytest.warns(UserWarning, match="longrope change beyond 2048 tokens"):
        engine = TransformersEngine(made, tiny.tokenizer(), name="longrope")
    with pytest.raises(NotComposable, match=r"up to 2048 tokens and the composite has 2049: .*\(longrope\)"):
        rotary.rotation_of(engine).check_span(2049)


def test_states_that_are_no_keys_are_refused_when_the_engine_loads() -> None:
    """Recurrent, hybrid and latent ones never get as far as the probe; the error names layer and reason."""
    mamba = MambaConfig(vocab_size=tiny.VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4)
    jamba = JambaConfig(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        use_mamba_kernels=False,
        mamba_d_state=4,
        mamba_dt_rank=4,
    )
    latent = DeepseekV3Config(
        vocab_size=tiny.VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        first_k_dense_replace=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    for config in (mamba, jamba, latent):
        with pytest.raises(UnsupportedModel, match=r"layer \d .*(recurrent|convolutional|latent)"):
            TransformersEngine(AutoModelForCausalLM.from_config(config), tiny.tokenizer(), name="hybrid")
