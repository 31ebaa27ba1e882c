"""The bytes of a tensor, whatever its shape and strides."""

from __future__ import annotations

import pytest
import torch

from aaflow_langgraph.tensors import tensor_bytes

ODD = {
    "no dimension": torch.tensor(3.5, dtype=torch.bfloat16),
    "no element": torch.zeros(0, 3),
    "a parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3)),
    "a column": torch.arange(20.0).reshape(4, 5)[:, 2:3],
    "transposed": torch.arange(20.0).reshape(4, 5).t(),
    "repeated": torch.arange(5.0).to(torch.float16).expand(3, 5),
    "truth values": torch.arange(4) > 1,
    "a last dimension of one with a stride of its own": torch.arange(6.0).as_strided((6, 1), (1, 7)),
    "five dimensions": torch.arange(48, dtype=torch.bfloat16).reshape(1, 2, 3, 2, 4),
}


@pytest.mark.parametrize("name", ODD)
def test_the_bytes_are_those_of_the_elements_in_order(name: str) -> None:
    tensor = ODD[name]
    raw = tensor_bytes(tensor)
    assert (raw.format, raw.ndim, raw.nbytes) == ("B", 1, tensor.nbytes)
    again = torch.tensor(list(raw), dtype=torch.uint8).view(tensor.dtype)
    assert again.tolist() == tensor.detach().flatten().tolist()


def test_bytes_of_a_contiguous_tensor_can_be_written_where_they_lie() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    tensor_bytes(tensor)[:2] = bytes(tensor_bytes(torch.tensor(1.5, dtype=torch.bfloat16)))
    assert tensor.tolist() == [[1.5, 0, 0], [0, 0, 0]]
