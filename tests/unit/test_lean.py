"""The lean forward: which models it takes, the same numbers as the stock modules, the model left as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaForCausalLM, PreTrainedModel

from aaflow_langgraph import TransformersEngine
from aaflow_langgraph.engine import lean, probe
from aaflow_langgraph.engine.base import Piece
from aaflow_langgraph.engine.lean import LeanForward, recognise
from tests import tiny

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}
# Multiplies cosines and sines by an attention factor above 1.
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 512}
RECOGNISED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, wide heads": ("llama", {"head_dim": 24}),
    "llama, no groups": ("llama", {"num_key_value_heads": 4}),
    "llama, scaled rotary": ("llama", {"rope_parameters": LLAMA3}),
    "llama, scaled attention": ("llama", {"rope_parameters": YARN}),
    "mistral, no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "head_dim": 32}),
}


class _Tail:
    """Room for a run's own tokens."""

    def __init__(self, engine: TransformersEngine, start: int, room: int) -> None:
        self.kv = torch.zeros(engine.layout.shape(room), dtype=engine.model.dtype)
        self.start = start
        self.length = 0

    def ensure(self, num_tokens: int) -> None:
        assert num_tokens <= self.kv.shape[3]


def made(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    kind, changes = RECOGNISED[name]
    model = tiny.model(kind, dtype=dtype, seed=seed, **changes)
    with torch.no_grad():  # what is made as ones and zeros would hide a norm or a bias that is left out
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def run_logits(engine: TransformersEngine, ids: list[int], cut: int) -> list[torch.Tensor]:
    """Logits after ``ids[:cut]``, after a prefill of all but three, and after each of three decoded tokens."""
    first = _Tail(engine, 0, cut)
    logits = [engine.start((), first, grid=None).prefill(ids[:cut])]
    run = engine.start((Piece(first.kv, 0, cut),), _Tail(engine, cut, len(ids)), grid=None)
    logits.append(run.prefill(ids[cut:-3]))
    logits += [run.decode(token_id) for token_id in ids[-3:]]
    return logits


def stock_logits(model: PreTrainedModel, ids: list[int], cut: int) -> list[torch.Tensor]:
    stock = copy.deepcopy(model)
    stock.set_attn_implementation("eager")
    with torch.no_grad():
        every = stock(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return [every[cut - 1], *every[-4:]]


@pytest.mark.parametrize("name", RECOGNISED)
def test_logits_equal_the_stock_modules(name: str) -> None:
    model = made(name)
    ids = tiny.words(333, seed=1)
    expected = stock_logits(model, ids, 300)
    engine = TransformersEngine(model, tiny.tokenizer())
    assert engine.read_path == "fast"
    assert engine.lean is not None
    assert dict(engine.namespace.facts)["lean"] == "True"
    for ours, stock in zip(run_logits(engine, ids, 300), expected, strict=True):
        assert (ours - stock).abs().max() < 1e-4 * stock.abs().max()
        assert int(ours.argmax()) == int(stock.argmax())


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("packed_bytes", [lean.PACKED_BYTES, 0])
def test_bf16_logits_are_as_near_to_fp32_as_the_stock_modules_are(
    name: str, packed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "PACKED_BYTES", packed_bytes)
    ids = tiny.words(200, seed=2)
    model = made(name, dtype=torch.bfloat16)
    exact = stock_logits(copy.deepcopy(model).float(), ids, 150)
    stock = stock_logits(model, ids, 150)
    engine = TransformersEngine(model, tiny.tokenizer())
    assert engine.lean is not None
    assert (engine.lean.packed_bytes > 0) == (packed_bytes > 0 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
    ours = run_logits(engine, ids, 150)
    missed = [sum(float((x - y).abs().mean()) for x, y in zip(side, exact, strict=True)) for side in (ours, stock)]
    assert missed[0] < 1.5 * missed[1]


def test_the_probe_keeps_the_stock_modules_where_the_lean_logits_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    right = LeanForward.__call__

    def wrong(self: LeanForward, *args: Any) -> torch.Tensor:
        return right(self, *args).roll(1)

    monkeypatch.setattr(LeanForward, "__call__", wrong)
    engine = TransformersEngine(made("llama"), tiny.tokenizer())
    assert engine.read_path == "fast"
    assert engine.lean is None
    assert dict(engine.namespace.facts)["lean"] == "False"
    ids = tiny.words(60)
    for ours, stock in zip(run_logits(engine, ids, 40), stock_logits(engine.model, ids, 40), strict=True):
        assert (ours - stock).abs().max() < 1e-4 * stock.abs().max()


def test_a_cached_verdict_keeps_the_lean_forward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny.save(tmp_path, "llama", max_position_embeddings=333)
    assert TransformersEngine.load(folder).lean is not None
    monkeypatch.setattr(probe, "_logits", None)
    assert TransformersEngine.load(folder).lean is not None


def test_the_model_computes_the_same_bits_and_holds_no_more_memory() -> None:
    model = made("qwen2")
    ids = torch.tensor([tiny.words(50)])
    before = model(input_ids=ids).logits
    held = {name: parameter.nbytes for name, parameter in model.named_parameters()}
    engine = TransformersEngine(model, tiny.tokenizer())
    assert engine.lean is not None
    with engine.stock_attention():
        assert torch.equal(model(input_ids=ids).logits, before)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == sum(held.values())
    mlp = model.model.layers[0].mlp
    assert mlp.gate_proj.weight.untyped_storage().data_ptr() == mlp.up_proj.weight.untyped_storage().data_ptr()


def test_a_second_engine_uses_the_memory_of_the_first() -> None:
    model = made("llama")
    engines = [TransformersEngine(model, tiny.tokenizer()) for _ in range(2)]
    assert all(engine.lean is not None and engine.lean.ready() for engine in engines)
    ids = tiny.words(60)
    assert all(torch.equal(a, b) for a, b in zip(*(run_logits(engine, ids, 40) for engine in engines), strict=True))


def test_a_saved_model_is_complete(tmp_path: Path) -> None:
    model = made("qwen3")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert TransformersEngine(model, tiny.tokenizer()).lean is not None
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_changed_in_place_are_the_weights_used(dtype: torch.dtype) -> None:
    engine = TransformersEngine(made("llama", dtype=dtype), tiny.tokenizer())
    other = made("llama", dtype=dtype, seed=1)
    ids = tiny.words(60)
    before = run_logits(engine, ids, 40)
    engine.model.load_state_dict(other.state_dict())
    assert engine.lean is not None
    assert engine.lean.ready()
    expected = run_logits(TransformersEngine(other, tiny.tokenizer()), ids, 40)
    after = run_logits(engine, ids, 40)
    assert all(torch.equal(a, b) for a, b in zip(after, expected, strict=True))
    assert not torch.equal(after[0], before[0])


def replace_weight(model: PreTrainedModel) -> None:
    projection = model.model.layers[1].mlp.down_proj
    projection.weight = nn.Parameter(projection.weight.detach() * 2)


def replace_module(model: PreTrainedModel) -> None:
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, nn.Tanh())


def replace_forward(model: PreTrainedModel) -> None:
    projection = model.model.layers[2].self_attn.v_proj
    projection.forward = lambda states: nn.functional.linear(states, projection.weight) * 0.5


def hook(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: output * 0.5)


@pytest.mark.parametrize("change", [replace_weight, replace_module, replace_forward, hook])
def test_what_comes_between_modules_and_weights_later_is_computed(change: Callable[[PreTrainedModel], None]) -> None:
    engine = TransformersEngine(made("llama"), tiny.tokenizer())
    ids = tiny.words(60)
    before = run_logits(engine, ids, 40)
    change(engine.model)
    assert engine.lean is not None
    assert not engine.lean.ready()
    after = run_logits(engine, ids, 40)
    for ours, stock in zip(after, stock_logits(engine.model, ids, 40), strict=True):
        assert (ours - stock).abs().max() < 1e-4 * stock.abs().max()
    assert not torch.allclose(after[0], before[0], rtol=1e-2)


def test_a_hook_that_is_gone_leaves_the_lean_forward_in_place() -> None:
    model = made("llama")
    forward = recognise(model, 4096)
    assert forward is not None
    handle = model.lm_head.register_forward_pre_hook(lambda module, inputs: None)
    assert not forward.ready()
    handle.remove()
    assert forward.ready()


def changed(change: Callable[[PreTrainedModel], Any]) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = made("llama")
        change(model)
        return model

    return make


class _Custom(LlamaForCausalLM):
    """Anybody's subclass."""


class _CustomLinear(nn.Linear):
    """Stands for a quantised, sharded or adapted projection."""


def swap_linear(model: PreTrainedModel) -> None:
    attention = model.model.layers[2].self_attn
    attention.k_proj = _CustomLinear(64, 32, bias=False)


NOT_RECOGNISED: dict[str, Callable[[], PreTrainedModel]] = {
    "another class": lambda: _Custom(tiny.config("llama")).eval(),
    "another activation": lambda: tiny.model("llama", hidden_act="gelu"),
    "training": changed(lambda model: model.train()),
    "replaced module": changed(swap_linear),
    "replaced layer": changed(lambda m: m.model.layers.__setitem__(0, nn.Identity())),
    "replaced forward": changed(replace_forward),
    "hook": changed(hook),
    "parametrised": changed(lambda m: nn.utils.parametrizations.weight_norm(m.model.layers[0].mlp.up_proj)),
    "one weight in another dtype": changed(lambda model: model.lm_head.double()),
    "one projection with a bias": changed(
        lambda m: setattr(m.model.layers[0].self_attn.k_proj, "bias", nn.Parameter(torch.zeros(32)))
    ),
    "another scale in one layer": changed(lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.1)),
    "fewer layers by configuration": changed(lambda m: setattr(m.config, "num_hidden_layers", 2)),
    "mistral with a window": lambda: tiny.model("mistral"),
    "granite": lambda: AutoModelForCausalLM.from_config(
        GraniteConfig(vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                      num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=None, eos_token_id=None)
    ).eval(),
    **{kind: (lambda kind=kind: tiny.model(kind)) for kind in ("gemma3", "phi", "gpt2")},
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_RECOGNISED)
def test_what_is_not_exactly_known_is_not_recognised_and_not_touched(name: str) -> None:
    model = NOT_RECOGNISED[name]()
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert recognise(model, 4096) is None
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
