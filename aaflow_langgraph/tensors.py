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
    flat = tensor.detach().contiguous().cpu().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy()
    return memoryview(raw) if flat.numel() else memoryview(b"")
