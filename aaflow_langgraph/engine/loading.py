"""What a model, its configuration and its files say before anything is computed: device, window, stop ids, rotary frequencies.

Knows transformers' conventions; knows no engine.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from aaflow_langgraph.errors import ConfigError, UnsupportedModel

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def pick_device(device: str) -> torch.device:
    """The torch device of a name; ``"auto"`` is CUDA when there is one.

    Raises:
        ConfigError: Unknown or absent. Way out: fail.
    """
    if not isinstance(device, str):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}") from error
    if picked.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return picked


def restore_rotary(model: PreTrainedModel) -> None:
    """Put rotary frequencies back to fp32: casting a whole model to 16 bits rounds them, and with them every position."""
    for module in model.modules():
        rounded = [
            name
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("inv_freq") and buffer.dtype != torch.float32
        ]
        if not rounded:
            continue
        config = getattr(module, "config", None)
        if config is None:
            raise UnsupportedModel(
                f"{type(module).__name__} holds rotary frequencies in {getattr(module, rounded[0]).dtype} and cannot rebuild "
                "them; load the model with dtype=... instead of casting it"
            )
        fresh = dict(type(module)(config=config).named_buffers(recurse=False))
        for name in rounded:
            setattr(module, name, fresh[name].to(getattr(module, name).device))


def window_of(config: Any) -> int:
    """Most tokens a sequence may have. Frequencies that change with length are exact up to the original window only."""
    window = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 1 << 20)
    rope = getattr(config, "rope_parameters", None) or {}
    flat = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    for entry in flat:
        if entry.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            original = int(entry.get("original_max_position_embeddings") or window)
            if original < window:
                warnings.warn(
                    f"rotary frequencies of type {entry['rope_type']} change beyond {original} tokens, which would change KV that "
                    f"is already stored: the window is {original} tokens instead of {window}",
                    stacklevel=4,
                )
            window = min(window, original)
    return window


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids that end a generation: the generation configuration's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None) if model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in (*ids, tokenizer.eos_token_id) if i is not None)


def weights_folder(source: str) -> Path | None:
    """Directory of the checkpoint's files."""
    if os.path.isdir(source):
        return Path(source)
    found = cached_file(source, "config.json")
    return Path(found).parent if found else None


def first_line(error: BaseException) -> str:
    """An error in a line of a message of ours."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__
