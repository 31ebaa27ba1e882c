"""Names of dtypes and the bytes of tensors, for everybody who stores, hashes or sends them."""

from __future__ import annotations

from typing import Any

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a tensor; zero copy, and writable, for contiguous CPU tensors."""
    if not (tensor.is_cpu and tensor.is_contiguous()):
        tensor = tensor.contiguous().cpu()
    if not tensor.numel():
        return memoryview(b"")
    if not tensor.dim() or tensor.stride(-1) != 1:
        tensor = tensor.reshape(-1)
    # Flattened by Python where it can be: with the processor's caches full of KV, each call of torch takes 5 us.
    raw: Any = tensor.detach().view(torch.uint8).numpy()
    return memoryview(raw).cast("B")
