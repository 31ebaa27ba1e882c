"""Tiny random models and tokenizers, made on the spot: no download, fixed seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    Gemma3TextConfig,
    GlmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
VOCAB = 320

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per byte, five special tokens, a ChatML template: ids 0-4 special, 5-260 the bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = template
    return fast


def config(kind: str, **changes: Any) -> Any:
    """Configuration of a tiny model of an architecture."""
    shared = {**_SHARED, **changes}
    if kind == "llama":
        return LlamaConfig(**shared)
    if kind == "qwen2":
        return Qwen2Config(**shared)
    if kind == "qwen3":
        return Qwen3Config(**{"head_dim": 16, **shared})
    if kind == "mistral":
        return MistralConfig(**{"sliding_window": 8, **shared})
    if kind == "gemma3":
        layers = ["sliding_attention", "full_attention", "sliding_attention"]
        return Gemma3TextConfig(
            **{"sliding_window": 24, **shared, "head_dim": 16, "layer_types": layers, "query_pre_attn_scalar": 16}
        )
    if kind == "phi":
        return PhiConfig(**{**shared, "partial_rotary_factor": 0.5})
    if kind == "cohere":  # pairs of neighbouring dims
        return CohereConfig(**shared)
    if kind == "glm":  # the same, on half of the dims
        return GlmConfig(**{"head_dim": 16, **shared})
    if kind == "smollm3":  # the middle layer has no positions
        return SmolLM3Config(**{"no_rope_layers": [1, 0, 1], **shared})
    if kind == "bloom":
        names = ("vocab_size", "hidden_size", "bos_token_id", "eos_token_id", "pad_token_id")
        return BloomConfig(n_layer=3, n_head=4, **{name: shared[name] for name in names})
    if kind == "opt":
        kept = {
            name: value for name, value in shared.items() if name not in ("intermediate_size", "num_key_value_heads")
        }
        return OPTConfig(ffn_dim=128, word_embed_proj_dim=64, **kept)
    if kind == "gpt2":
        return GPT2Config(
            vocab_size=VOCAB,
            n_embd=64,
            n_layer=3,
            n_head=4,
            n_positions=shared["max_position_embeddings"],
            bos_token_id=None,
            eos_token_id=None,
        )
    raise ValueError(kind)


def model(kind: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model; weights wide enough that logits differ and greedy paths do not hang on rounding."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(kind, **changes))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2 if "embed" in name or "wte" in name else 0.12)
    return made.to(dtype).eval()


def save(folder: Path, kind: str = "llama", *, template: str | None = CHATML, **options: Any) -> Path:
    """A model and tokenizer on disk, as ``save_pretrained`` writes them."""
    model(kind, **options).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def words(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids that are plain bytes (no special tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 261, (count,), generator=generator).tolist()
