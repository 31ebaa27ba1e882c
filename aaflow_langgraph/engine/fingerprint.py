"""What makes two engines able to share KV: digests of weights, tokenizer and rotary settings (I6).

File digests are cached by path, size and modification time under the user's cache directory; parameters of a model that
was handed over in memory are hashed as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aaflow_langgraph._cache_dir import cache_dir
from aaflow_langgraph.hashing import digest
from aaflow_langgraph.model import BLOCK_TOKENS, LAYOUT_VERSION, Namespace
from aaflow_langgraph.tensors import dtype_name, tensor_bytes

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf")


def read_cached(kind: str, key: str) -> Any:
    """A small cached JSON value, or None. A file that cannot be read is a miss."""
    try:
        return json.loads((cache_dir() / kind / f"{key}.json").read_text())
    except (OSError, ValueError):
        return None


def write_cached(kind: str, key: str, value: Any) -> None:
    """Store a small JSON value, whole or not at all. An unwritable cache directory costs time, not the run."""
    try:
        folder = cache_dir() / kind
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, delete=False, suffix=".tmp") as file:
            json.dump(value, file)
        os.replace(file.name, folder / f"{key}.json")
    except OSError:
        return


def weights_digest(model: PreTrainedModel, folder: Path | None) -> str:
    """Digest of the weights: of the checkpoint's files when they are known, else of the parameters in memory."""
    files = sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)}) if folder else []
    if files:
        return digest("weights", *(part for file in files for part in (file.name, file_digest(file))))
    state = hashlib.blake2b(digest_size=32)
    for name, tensor in _tensors(model):
        state.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        state.update(tensor_bytes(tensor))
    return state.hexdigest()


def file_digest(file: Path) -> str:
    """BLAKE2b of a file, cached by resolved path, size and modification time."""
    real = file.resolve()
    stat = real.stat()
    key = digest("file", str(real), str(stat.st_size), str(stat.st_mtime_ns))
    known = read_cached("digests", key)
    if isinstance(known, str) and len(known) == 64:
        return known
    with real.open("rb") as stream:
        value = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
    write_cached("digests", key, value)
    return value


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of everything that turns text into ids, the chat template included."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        described = json.loads(backend.to_str())
        # Padding and truncation change with the last call, not with the tokenizer.
        described.pop("padding", None)
        described.pop("truncation", None)
    else:
        described = tokenizer.get_vocab()
    template = tokenizer.chat_template
    special = {name: str(value) for name, value in sorted(tokenizer.special_tokens_map.items())}
    return digest(
        "tokenizer",
        json.dumps(described, sort_keys=True, ensure_ascii=False),
        json.dumps(template, sort_keys=True),
        json.dumps(special, sort_keys=True),
    )


def rotary_digest(model: PreTrainedModel) -> str:
    """Digest of the rotary frequencies as loaded, and of how the configuration names them."""
    parts: list[bytes | str] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            parts += [name, str(buffer.dtype), bytes(tensor_bytes(buffer))]
    config = model.config.get_text_config(decoder=True)
    parts.append(json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str))
    return digest("rotary", *parts)


def make_namespace(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    folder: Path | None,
    tenant: str,
    read_path: str,
    lean: bool,
    attention: str,
) -> Namespace:
    """The namespace of a loaded model for one tenant."""
    dtype = dtype_name(model.dtype)
    adapters = getattr(model, "peft_config", None)
    # Adapter weights live in memory only, so with adapters the parameters are hashed as they are.
    weights = weights_digest(model, None if adapters else folder)
    value = digest(
        "namespace",
        type(model).__name__,
        weights,
        tokenizer_digest(tokenizer),
        dtype,
        rotary_digest(model),
        str(BLOCK_TOKENS),
        str(LAYOUT_VERSION),
        tenant,
    )
    facts = (
        ("read_path", read_path),
        ("lean", str(lean)),
        ("attention", attention),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("threads", str(torch.get_num_threads())),
        ("cpu", torch.backends.cpu.get_cpu_capability()),
        ("device", str(model.device)),
    )
    return Namespace(digest=value, model=name, dtype=dtype, tenant=tenant, facts=facts)


def _tensors(model: PreTrainedModel) -> Iterable[tuple[str, torch.Tensor]]:
    return sorted(model.state_dict().items())
