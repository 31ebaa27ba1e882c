"""The device pool: the same region on an accelerator, so that KV is read where the model computes."""

from __future__ import annotations

import torch

from aaflow_langgraph.model import Tier
from aaflow_langgraph.pool.host import HostPool


class DevicePool(HostPool):
    """A pool in the memory of one CUDA device. See ``Pool`` for the contract."""

    tier: Tier = "device"

    def __init__(self, capacity_bytes: int, device: torch.device) -> None:
        super().__init__(capacity_bytes, device=device)
